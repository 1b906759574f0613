/* mimalloc's own entry points. */
#include "truth.h"
#include <mimalloc.h>
#include <string.h>

/* What is copied; ends nowhere but at its end. */
static char text[200000];

SITE struct block site_mi_strdup(size_t n)
{
	text[n - 1] = 0;
	void *p = mi_strdup(text);
	text[n - 1] = 'x';
	return TOOK(p, n);
}
SITE struct block site_mi_heap_strdup(size_t n)
{
	text[n - 1] = 0;
	void *p = mi_heap_strdup(mi_heap_get_default(), text);
	text[n - 1] = 'x';
	return TOOK(p, n);
}
SITE struct block site_mi_strndup(size_t n) { void *p = mi_strndup(text, n - 1); return TOOK(p, n); }
SITE struct block site_mi_heap_strndup(size_t n) { void *p = mi_heap_strndup(mi_heap_get_default(), text, n - 1); return TOOK(p, n); }

SITE struct block site_mi_malloc(size_t n) { void *p = mi_malloc(n); return TOOK(p, n); }
SITE struct block site_mi_zalloc(size_t n) { void *p = mi_zalloc(n); return TOOK(p, n); }
SITE struct block site_mi_calloc(size_t c, size_t n) { void *p = mi_calloc(c, n); return TOOK(p, c * n); }
SITE struct block site_mi_mallocn(size_t c, size_t n) { void *p = mi_mallocn(c, n); return TOOK(p, c * n); }
SITE struct block site_mi_malloc_small(size_t n) { void *p = mi_malloc_small(n); return TOOK(p, n); }
SITE struct block site_mi_zalloc_small(size_t n) { void *p = mi_zalloc_small(n); return TOOK(p, n); }
SITE struct block site_mi_malloc_aligned(size_t n) { void *p = mi_malloc_aligned(n, 256); return TOOK(p, n); }
SITE struct block site_mi_malloc_aligned_at(size_t n) { void *p = mi_malloc_aligned_at(n, 64, 16); return TOOK(p, n); }
SITE struct block site_mi_zalloc_aligned(size_t n) { void *p = mi_zalloc_aligned(n, 512); return TOOK(p, n); }
SITE struct block site_mi_calloc_aligned(size_t c, size_t n) { void *p = mi_calloc_aligned(c, n, 64); return TOOK(p, c * n); }
SITE struct block site_mi_memalign(size_t n) { void *p = mi_memalign(64, n); return TOOK(p, n); }
SITE struct block site_mi_aligned_alloc(size_t n) { void *p = mi_aligned_alloc(64, n); return TOOK(p, n); }
SITE struct block site_mi_valloc(size_t n) { void *p = mi_valloc(n); return TOOK(p, n); }
SITE struct block site_mi_new(size_t n) { void *p = mi_new(n); return TOOK(p, n); }
SITE struct block site_mi_new_nothrow(size_t n) { void *p = mi_new_nothrow(n); return TOOK(p, n); }
SITE struct block site_mi_new_n(size_t c, size_t n) { void *p = mi_new_n(c, n); return TOOK(p, c * n); }
SITE struct block site_mi_new_aligned(size_t n) { void *p = mi_new_aligned(n, 128); return TOOK(p, n); }
SITE struct block site_mi_heap_malloc(size_t n) { void *p = mi_heap_malloc(mi_heap_get_default(), n); return TOOK(p, n); }
SITE struct block site_mi_heap_zalloc(size_t n) { void *p = mi_heap_zalloc(mi_heap_get_default(), n); return TOOK(p, n); }

SITE struct block site_mi_posix_memalign(size_t n)
{
	void *p = NULL;
	REQUIRE(mi_posix_memalign(&p, 64, n) == 0);
	return TOOK(p, n);
}

#define RESIZE(name, call, bytes)                                                                                                 \
	SITE struct block site_##name(struct block old, size_t n)                                                                 \
	{                                                                                                                         \
		truth_strike(old);                                                                                                \
		void *p = call;                                                                                                   \
		REQUIRE(p);                                                                                                       \
		return TOOK(p, bytes);                                                                                            \
	}
RESIZE(mi_realloc, mi_realloc(old.ptr, n), n)
RESIZE(mi_reallocf, mi_reallocf(old.ptr, n), n)
RESIZE(mi_reallocn, mi_reallocn(old.ptr, 3, n), 3 * n)
RESIZE(mi_reallocarray, mi_reallocarray(old.ptr, 5, n), 5 * n)
RESIZE(mi_rezalloc, mi_rezalloc(old.ptr, n), n)
RESIZE(mi_recalloc, mi_recalloc(old.ptr, 7, n), 7 * n)
RESIZE(mi_realloc_aligned, mi_realloc_aligned(old.ptr, n, 128), n)
RESIZE(mi_new_realloc, mi_new_realloc(old.ptr, n), n)

/* Unlike realloc, it frees the block if it fails. */
SITE void site_mi_reallocf_fails(struct block old)
{
	volatile size_t huge = (size_t)PTRDIFF_MAX - 4096;
	truth_strike(old);
	REQUIRE(mi_reallocf(old.ptr, huge) == NULL);
}

typedef struct block (*make_fn)(size_t);
typedef struct block (*resize_fn)(struct block, size_t);

static void drop(struct block b, unsigned how)
{
	truth_strike(b);
	switch (how % 3) {
	case 0:
		mi_free(b.ptr);
		break;
	case 1:
		mi_free_size(b.ptr, b.size);
		break;
	default:
		mi_cfree(b.ptr);
	}
}

int main(void)
{
	static const make_fn makes[] = {
		site_mi_malloc, site_mi_zalloc, site_mi_malloc_small, site_mi_zalloc_small, site_mi_malloc_aligned, site_mi_malloc_aligned_at,
		site_mi_zalloc_aligned, site_mi_memalign, site_mi_aligned_alloc, site_mi_valloc, site_mi_new, site_mi_new_nothrow,
		site_mi_new_aligned, site_mi_heap_malloc, site_mi_heap_zalloc, site_mi_posix_memalign,
		site_mi_strdup, site_mi_heap_strdup, site_mi_strndup, site_mi_heap_strndup,
	};
	static const resize_fn resizes[] = {
		site_mi_realloc, site_mi_reallocf, site_mi_reallocn, site_mi_reallocarray,
		site_mi_rezalloc, site_mi_recalloc, site_mi_realloc_aligned, site_mi_new_realloc,
	};
	memset(text, 'x', sizeof text - 1);
	truth_rendezvous("ready");
	site_mi_strdup(1);
	site_mi_strdup(sizeof text);
	for (unsigned i = 0; i < 30; i++) {
		for (size_t k = 0; k < sizeof makes / sizeof *makes; k++) {
			drop(makes[k](64 + 8 * i), i);
			makes[k](128 + i);
		}
		drop(site_mi_calloc(3, 30), i);
		site_mi_calloc(4, 40);
		drop(site_mi_mallocn(3, 50), i);
		site_mi_mallocn(2, 1000);
		drop(site_mi_calloc_aligned(3, 64), i);
		site_mi_calloc_aligned(5, 64);
		drop(site_mi_new_n(9, 9), i);
		site_mi_new_n(10, 10);
		for (size_t k = 0; k < sizeof resizes / sizeof *resizes; k++) {
			/* From NULL, moved, in place, freed; and one moved block survives. */
			drop(resizes[k](resizes[k](resizes[k]((struct block){ 0 }, 40), 9000), 9001), i);
			resizes[k](site_mi_malloc(100), 3000 + i);
		}
		site_mi_reallocf_fails(site_mi_malloc(200));
		/* In place or fails. */
		struct block b = site_mi_malloc(1000);
		REQUIRE(mi_expand(b.ptr, 100000) == NULL);
	}
	mi_free(NULL);
	truth_rendezvous("done");
	return 0;
}
