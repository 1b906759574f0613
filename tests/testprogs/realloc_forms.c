/* realloc in place, moving, shrinking, through mremap, to zero, from NULL and failing. */
#include "truth.h"

SITE struct block early_malloc(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_malloc(size_t n) { void *p = malloc(n); REQUIRE(p); return TOOK(p, n); }

#define RESIZE(name)                                                                                                              \
	SITE struct block name(struct block old, size_t n)                                                                        \
	{                                                                                                                         \
		truth_strike(old);                                                                                                \
		void *p = realloc(old.ptr, n);                                                                                    \
		REQUIRE(p);                                                                                                       \
		return TOOK(p, n);                                                                                                \
	}
RESIZE(site_from_null)
RESIZE(site_in_place)
RESIZE(site_moves)
RESIZE(site_shrinks)
RESIZE(site_mremap)
RESIZE(site_from_early)

/* realloc(p, 0): glibc and tcmalloc free and return NULL; jemalloc and mimalloc return a block of size 0. */
SITE struct block site_to_zero(struct block old)
{
	volatile size_t none = 0;
	truth_strike(old);
	void *p = realloc(old.ptr, none);
	return TOOK(p, 0);
}

SITE void site_fails(struct block old)
{
	volatile size_t huge = (size_t)PTRDIFF_MAX - 4096;
	truth_strike(old);
	void *p = realloc(old.ptr, huge);
	REQUIRE(!p);
	truth_restore(old);
}

int main(void)
{
	struct block early[40];
	for (int i = 0; i < 40; i++)
		early[i] = early_malloc(200);
	truth_rendezvous("ready");
	for (size_t i = 0; i < 40; i++) {
		site_from_null((struct block){ 0 }, 60 + i);
		/* One byte more, within the rounding, stays in place. */
		struct block b = site_in_place(site_malloc(97), 98);
		site_in_place(b, 99);
		/* An adjacent block after it keeps the block from growing in place. */
		b = site_malloc(100);
		struct block wall = site_malloc(100);
		b = site_moves(b, 3000 + i);
		block_free(wall);
		if (i % 2)
			b = site_shrinks(b, 10);
		if (i % 4 == 3)
			block_free(b);
		/* Beyond the mmap threshold: grown and shrunk by mremap. */
		b = site_mremap(site_malloc(300000), 900000 + i);
		b = site_mremap(b, 200000);
		if (i % 8)
			block_free(b);
		b = site_to_zero(site_malloc(500 + i));
		if (i % 2) {
			truth_strike(b);
			free(b.ptr);
		}
		b = site_malloc(77);
		site_fails(b);
		if (i % 2)
			block_free(b);
		early[i] = site_from_early(early[i], i % 2 ? 150 : 5000);
		if (i % 5 == 0)
			block_free(early[i]);
	}
	truth_rendezvous("done");
	return 0;
}
