/* Allocates, resizes and frees in rounds, each begun by the test; tells its ledger after each. For long recordings. */
#include "truth.h"

#define KEPT 4096

SITE struct block site_round(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_zeroed(size_t n) { void *p = calloc(1, n); return TOOK(p, n); }

int main(void)
{
	static struct block kept[KEPT];
	uint64_t random = 88172645463325252ULL;

	truth_rendezvous("ready");
	for (;;) {
		for (int i = 0; i < 20000; i++) {
			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			struct block *b = &kept[random % KEPT];
			block_free(*b);
			*b = random & (1 << 20) ? site_zeroed(1 + (random >> 24) % 5000) : site_round(1 + (random >> 24) % 300);
		}
		truth_rendezvous("round");
	}
}
