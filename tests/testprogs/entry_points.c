/* Every C entry point, each with survivors and frees of known sizes, and frees of blocks allocated before the recording. */
#include "truth.h"
#include <malloc.h>
#ifndef TRUTH_STATIC
#include <dlfcn.h>
#endif

#define ROUNDS 50

SITE struct block early_malloc(size_t size) { void *p = malloc(size); return TOOK(p, size); }
SITE struct block site_malloc(size_t size) { void *p = malloc(size); return TOOK(p, size); }
SITE struct block site_calloc(size_t count, size_t size) { void *p = calloc(count, size); return TOOK(p, count * size); }
SITE struct block site_memalign(size_t size) { void *p = memalign(64, size); return TOOK(p, size); }
SITE struct block site_aligned_alloc(size_t size) { void *p = aligned_alloc(128, size); return TOOK(p, size); }
SITE struct block site_valloc(size_t size) { void *p = valloc(size); return TOOK(p, size); }

SITE struct block site_realloc(struct block old, size_t size)
{
	truth_strike(old);
	void *p = realloc(old.ptr, size);
	REQUIRE(p);
	return TOOK(p, size);
}

SITE struct block site_reallocarray(struct block old, size_t count, size_t size)
{
	truth_strike(old);
	void *p = reallocarray(old.ptr, count, size);
	REQUIRE(p);
	return TOOK(p, count * size);
}

SITE struct block site_posix_memalign(size_t size)
{
	void *p = NULL;
	REQUIRE(posix_memalign(&p, 256, size) == 0);
	return TOOK(p, size);
}

SITE struct block site_malloc_zero(void) { void *p = malloc(0); return TOOK(p, 0); }

/* pvalloc is missing in musl and jemalloc. A static program skips it. */
#ifndef TRUTH_STATIC
SITE struct block site_pvalloc(size_t size) { void *p = pvalloc(size); return TOOK(p, size); }

/* If an allocator lacks an entry point, glibc's is called, whose block the allocator's free does not accept. */
static int same_allocator(const char *symbol)
{
	Dl_info a, b;
	return dladdr(dlsym(RTLD_DEFAULT, symbol), &a) && dladdr(dlsym(RTLD_DEFAULT, "malloc"), &b) && a.dli_fbase == b.dli_fbase;
}
#endif

int main(int argc, char **argv)
{
	struct block early[ROUNDS];
	for (int i = 0; i < ROUNDS; i++)
		early[i] = early_malloc(100 + i);
#ifndef TRUTH_STATIC
	/* valgrind terminates a program that calls it. */
	int has_pvalloc = !(argc > 1 && strcmp(argv[1], "without-pvalloc") == 0) && same_allocator("pvalloc");
#else
	(void)argc, (void)argv;
#endif
	truth_rendezvous("ready");
	for (int i = 0; i < ROUNDS; i++) {
		/* Each site allocates two blocks, and one is freed. */
		block_free(site_malloc(24 + i));
		site_malloc(1000 + i);
		block_free(site_calloc(3, 100 + i));
		site_calloc(7, 11);
		block_free(site_memalign(333));
		site_memalign(4000 + i);
		block_free(site_aligned_alloc(128 * (size_t)(i + 1)));
		site_aligned_alloc(128);
		block_free(site_valloc(10));
		site_valloc(5000);
		block_free(site_posix_memalign(77));
		site_posix_memalign(78 + i);
		block_free(site_malloc_zero());
		site_malloc_zero();
		site_realloc(site_realloc((struct block){ 0 }, 40 + i), 400000);
		site_reallocarray(site_malloc(9), 30, 31);
		block_free(site_reallocarray((struct block){ 0 }, 5, 7));
#ifndef TRUTH_STATIC
		if (has_pvalloc) {
			block_free(site_pvalloc(100));
			site_pvalloc(200);
		}
#endif
		/* A third of the early blocks are freed, a third move, a third stay. */
		if (i % 3 == 0)
			block_free(early[i]);
		else if (i % 3 == 1)
			early[i] = site_realloc(early[i], 50);
	}
	free(NULL);
	truth_rendezvous("done");
	return 0;
}
