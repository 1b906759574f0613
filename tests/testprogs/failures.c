/* Calls that fail: nothing may be recorded for them, and after a failed realloc the block is still live. */
#include "truth.h"
#include <malloc.h>
#include <sys/resource.h>

SITE struct block site_lives(size_t n) { void *p = malloc(n); REQUIRE(p); return TOOK(p, n); }
SITE void *site_malloc_fails(size_t n) { void *p = malloc(n); return TOOK(p, n).ptr; }
SITE void *site_calloc_fails(size_t c, size_t n) { void *p = calloc(c, n); return TOOK(p, c * n).ptr; }
SITE void *site_realloc_fails(void *old, size_t n) { void *p = realloc(old, n); return TOOK(p, n).ptr; }
SITE void *site_reallocarray_fails(void *old, size_t c, size_t n) { void *p = reallocarray(old, c, n); return TOOK(p, c * n).ptr; }
SITE void *site_memalign_fails(size_t a, size_t n) { void *p = memalign(a, n); return TOOK(p, n).ptr; }
SITE void *site_aligned_alloc_fails(size_t a, size_t n) { void *p = aligned_alloc(a, n); return TOOK(p, n).ptr; }

SITE int site_posix_memalign_fails(size_t a, size_t n)
{
	void *p = (void *)0x1234; /* unchanged: a failing call does not write it */
	int error = posix_memalign(&p, a, n);
	if (!error)
		TOOK(p, n);
	return error;
}

int main(void)
{
	/* Volatile, so that the compiler does not see that these calls must fail. */
	volatile size_t huge = (size_t)PTRDIFF_MAX - 4096, wraps = SIZE_MAX / 2 + 2;
	/* A preloaded tcmalloc or mimalloc reserves address space in large steps: leave room for the small blocks. */
	volatile size_t beyond_limit = (size_t)8 << 30;
	struct block kept[64];
	truth_rendezvous("ready");
	for (int i = 0; i < 64; i++) {
		kept[i] = site_lives(100 + (size_t)i);
		REQUIRE(!site_malloc_fails(huge));
		REQUIRE(!site_calloc_fails(wraps, 4));
		REQUIRE(!site_calloc_fails(huge, 1));
		REQUIRE(!site_realloc_fails(kept[i].ptr, huge));
		REQUIRE(!site_realloc_fails(NULL, huge));
		REQUIRE(!site_reallocarray_fails(kept[i].ptr, wraps, 8));
		REQUIRE(!site_memalign_fails(64, huge));
		REQUIRE(!site_aligned_alloc_fails(4096, huge));
		REQUIRE(site_posix_memalign_fails(64, huge) == ENOMEM);
		REQUIRE(site_posix_memalign_fails(3, 100) == EINVAL);
	}
	struct rlimit limit = { (rlim_t)6 << 30, (rlim_t)6 << 30 };
	REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
	for (int i = 0; i < 16; i++) {
		REQUIRE(!site_malloc_fails(beyond_limit));
		REQUIRE(!site_calloc_fails(2, beyond_limit));
		REQUIRE(!site_realloc_fails(kept[i].ptr, beyond_limit));
		REQUIRE(site_posix_memalign_fails(4096, beyond_limit) == ENOMEM);
	}
	for (int i = 0; i < 64; i += 2)
		block_free(kept[i]);
	truth_rendezvous("done");
	return 0;
}
