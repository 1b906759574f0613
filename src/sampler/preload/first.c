/* The first call of each function, if it comes before the constructor: it fills the table of the next definitions. */
#include "next.h"

static void *first_malloc(size_t size)
{
	next_resolve();
	return next.malloc(size);
}

static void first_free(void *pointer)
{
	next_resolve();
	next.free(pointer);
}

static void *first_calloc(size_t count, size_t size)
{
	next_resolve();
	return next.calloc(count, size);
}

static void *first_realloc(void *pointer, size_t size)
{
	next_resolve();
	return next.realloc(pointer, size);
}

static int first_posix_memalign(void **out, size_t alignment, size_t size)
{
	next_resolve();
	return next.posix_memalign(out, alignment, size);
}

static void *first_aligned_alloc(size_t alignment, size_t size)
{
	next_resolve();
	return next.aligned_alloc(alignment, size);
}

static void *first_memalign(size_t alignment, size_t size)
{
	next_resolve();
	return next.memalign(alignment, size);
}

static void *first_valloc(size_t size)
{
	next_resolve();
	return next.valloc(size);
}

static void *first_pvalloc(size_t size)
{
	next_resolve();
	return next.pvalloc(size);
}

static void *first_reallocarray(void *pointer, size_t count, size_t size)
{
	next_resolve();
	return next.reallocarray(pointer, count, size);
}

static void first_free_sized(void *pointer, size_t size)
{
	next_resolve();
	next.free_sized(pointer, size);
}

static void first_free_aligned_sized(void *pointer, size_t alignment, size_t size)
{
	next_resolve();
	next.free_aligned_sized(pointer, alignment, size);
}

OWN_LINES struct next next = {
	.malloc = first_malloc,
	.free = first_free,
	.calloc = first_calloc,
	.realloc = first_realloc,
	.posix_memalign = first_posix_memalign,
	.aligned_alloc = first_aligned_alloc,
	.memalign = first_memalign,
	.valloc = first_valloc,
	.pvalloc = first_pvalloc,
	.reallocarray = first_reallocarray,
	.free_sized = first_free_sized,
	.free_aligned_sized = first_free_aligned_sized,
};
