/* Over-aligned blocks: from 16 bytes to 2 MiB, with sizes that are not multiples; freed and resized like others. */
#include "truth.h"
#include <malloc.h>

SITE struct block site_posix_memalign(size_t align, size_t n)
{
	void *p = NULL;
	REQUIRE(posix_memalign(&p, align, n) == 0 && (uintptr_t)p % align == 0);
	return TOOK(p, n);
}

SITE struct block site_memalign(size_t align, size_t n)
{
	void *p = memalign(align, n);
	REQUIRE(p && (uintptr_t)p % align == 0);
	return TOOK(p, n);
}

SITE struct block site_realloc_aligned_block(struct block old, size_t n)
{
	truth_strike(old);
	void *p = realloc(old.ptr, n);
	REQUIRE(p);
	return TOOK(p, n);
}

int main(void)
{
	truth_rendezvous("ready");
	for (size_t round = 0; round < 4; round++)
		for (size_t align = 16; align <= (size_t)2 << 20; align *= 2) {
			block_free(site_posix_memalign(align, align / 2 + 1));
			site_posix_memalign(align, 1 + round);
			block_free(site_memalign(align, 3 * align + 7));
			site_memalign(align, 333 + round);
			struct block b = site_realloc_aligned_block(site_memalign(align, 100), 5000 + round);
			if (round % 2)
				block_free(b);
		}
	truth_rendezvous("done");
	return 0;
}
