/* Allocations under stacks from 2 to 5,000 frames: around the recorder's frame limit and far beyond it. */
#include "truth.h"

SITE struct block site_deep(size_t n) { void *p = malloc(n); return TOOK(p, n); }

/* The volatile local makes each level a separate frame. */
SITE struct block descend(int depth, size_t n)
{
	volatile char local[24] = { 0 };
	struct block b = depth > 0 ? descend(depth - 1, n) : site_deep(n);
	local[0]++;
	return b;
}

int main(void)
{
	static const int depths[] = { 0, 1, 50, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129, 130, 300, 5000 };
	truth_rendezvous("ready");
	for (size_t round = 0; round < 20; round++)
		for (size_t i = 0; i < sizeof depths / sizeof *depths; i++) {
			block_free(descend(depths[i], 100));
			descend(depths[i], 200 + i);
		}
	truth_rendezvous("done");
	return 0;
}
