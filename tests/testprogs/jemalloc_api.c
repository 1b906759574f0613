/* jemalloc's own entry points. Sizes that resize in place are size classes, so that requested and usable size are equal. */
#include "truth.h"
#include <jemalloc/jemalloc.h>

SITE struct block site_mallocx(size_t n, int flags) { void *p = mallocx(n, flags); return TOOK(p, n); }

SITE struct block site_rallocx(struct block old, size_t n, int flags)
{
	truth_strike(old);
	void *p = rallocx(old.ptr, n, flags);
	REQUIRE(p);
	return TOOK(p, n);
}

/* Grows or shrinks in place to exactly N, or leaves the block as it was. */
SITE struct block site_xallocx(struct block old, size_t n)
{
	truth_strike(old);
	size_t usable = xallocx(old.ptr, n, 0, 0);
	if (usable != n) {
		REQUIRE(usable == old.size);
		truth_restore(old);
		return old;
	}
	return TOOK(old.ptr, n);
}

int main(void)
{
	truth_rendezvous("ready");
	unsigned resized = 0;
	for (size_t i = 0; i < 50; i++) {
		struct block b = site_mallocx(100 + i, 0);
		truth_strike(b);
		dallocx(b.ptr, 0);
		b = site_mallocx(200 + i, MALLOCX_ALIGN(256));
		truth_strike(b);
		sdallocx(b.ptr, b.size, MALLOCX_ALIGN(256));
		site_mallocx(300 + i, MALLOCX_ZERO);
		site_rallocx(site_mallocx(64, 0), 7000 + i, 0);
		b = site_rallocx(site_mallocx(640, 0), 32, MALLOCX_TCACHE_NONE);
		truth_strike(b);
		dallocx(b.ptr, MALLOCX_TCACHE_NONE);
		/* 32 KiB to 28 KiB (large classes) shrinks in place; 64 to 80 (small classes) cannot. */
		struct block large = site_mallocx(32768, 0);
		struct block after = site_xallocx(large, 28672);
		resized += after.size == 28672;
		struct block small = site_mallocx(64, 0);
		REQUIRE(site_xallocx(small, 80).size == 64);
		REQUIRE(nallocx(100, 0) == 112);
		block_free(site_mallocx(48, 0));
	}
	REQUIRE(resized > 0);
	truth_rendezvous("done");
	return 0;
}
