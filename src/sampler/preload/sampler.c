/* The interposed functions of C.
 *
 * Without a consumer each is a load, a test and a jump to the next definition: errno, alignment, usable size, failure and everything else
 * are the allocator's. With a consumer, an allocation also counts down, and a free also reads one counter of the set's filter; only sampled
 * blocks need more.
 *
 * Before a free the block still belongs to the program; after an allocation it is not yet known to any other thread. So the probe alloc
 * comes after the allocator's work, and free before it: otherwise another thread's use of the same address could be reported first. */
#include "next.h"
#include "sample.h"

RARE static void *malloc_at_point(size_t size, const void *caller)
{
	void *pointer = next.malloc(size);

	/* Not before the call: a failed one has no sample point. */
	if (pointer != NULL)
		sample_count_of(caller, pointer, size);
	return pointer;
}

EXPORT void *malloc(size_t size)
{
	if (listening_alloc()) {
		struct thread *thread = thread_at_home();
		int64_t left = thread != NULL ? (int64_t)((uint64_t)thread->left_bytes - size) : -1;

		if (unlikely(left < 0))
			return malloc_at_point(size, CALLER_ADDRESS());
		thread->left_bytes = left;
	}
	return next.malloc(size);
}

RARE static void free_perhaps_sampled(void *pointer)
{
	sample_free(pointer);
	next.free(pointer);
}

EXPORT void free(void *pointer)
{
	if (listening_free() && set_may_hold(pointer))
		return free_perhaps_sampled(pointer);
	next.free(pointer);
}

/* Exists in glibc before 2.26, and in mimalloc. */
EXPORT void cfree(void *pointer) __attribute__((alias("free")));

/* C23: frees with a hint that is only passed on. */
EXPORT void free_sized(void *pointer, size_t size)
{
	if (listening_free() && set_may_hold(pointer))
		sample_free(pointer);
	next.free_sized(pointer, size);
}

EXPORT void free_aligned_sized(void *pointer, size_t alignment, size_t size)
{
	if (listening_free() && set_may_hold(pointer))
		sample_free(pointer);
	next.free_aligned_sized(pointer, alignment, size);
}

static bool counts(void)
{
	return listening_alloc() && !sample_is_inner();
}

EXPORT void *calloc(size_t count, size_t size)
{
	size_t total;

	if (!counts() || __builtin_mul_overflow(count, size, &total))
		return next.calloc(count, size);
	return SAMPLE_OUTER(CALLER_ADDRESS(), total, next.calloc(count, size));
}

/* No x86-64 process has an address space of this size: a realloc to it fails and frees nothing. */
#define NEVER_FITS_BYTES (1ull << 56)

RARE static void *realloc_listened(void *pointer, size_t size, const void *caller)
{
	struct sampled sampled;
	/* The free is reported before the call, because another thread may get the old address during it. If the call fails for lack of
	 * memory, the block is reported again, and its first stack is lost. */
	bool taken = size < NEVER_FITS_BYTES && listening_free() && set_may_hold(pointer) && sample_take(pointer, &sampled);
	void *moved = counts() ? SAMPLE_OUTER(caller, size, next.realloc(pointer, size)) : next.realloc(pointer, size);

	/* It failed and the old block stays live; with size 0, NULL means freed (glibc, jemalloc). */
	if (taken && moved == NULL && size != 0)
		sample_put_back(pointer, sampled);
	return moved;
}

/* The new block is sampled like any other, whether the old one was sampled or not, so live bytes are unbiased. */
EXPORT void *realloc(void *pointer, size_t size)
{
	if (listening_alloc() || listening_free())
		return realloc_listened(pointer, size, CALLER_ADDRESS());
	return next.realloc(pointer, size);
}

EXPORT void *reallocarray(void *pointer, size_t count, size_t size)
{
	size_t total;

	/* Too large: called only to fail in the libc's own way. */
	if (__builtin_mul_overflow(count, size, &total))
		return next.reallocarray(pointer, count, size);
	if (listening_alloc() || listening_free())
		return realloc_listened(pointer, total, CALLER_ADDRESS());
	/* glibc's and musl's call realloc, which is interposed. */
	return next.realloc(pointer, total);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t size)
{
	int error;

	if (!counts())
		return next.posix_memalign(out, alignment, size);
	SAMPLE_OUTER(CALLER_ADDRESS(), size, (error = next.posix_memalign(out, alignment, size)) == 0 ? *out : NULL);
	return error;
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
	if (!counts())
		return next.aligned_alloc(alignment, size);
	return SAMPLE_OUTER(CALLER_ADDRESS(), size, next.aligned_alloc(alignment, size));
}

EXPORT void *memalign(size_t alignment, size_t size)
{
	if (!counts())
		return next.memalign(alignment, size);
	return SAMPLE_OUTER(CALLER_ADDRESS(), size, next.memalign(alignment, size));
}

EXPORT void *valloc(size_t size)
{
	if (!counts())
		return next.valloc(size);
	return SAMPLE_OUTER(CALLER_ADDRESS(), size, next.valloc(size));
}

EXPORT void *pvalloc(size_t size)
{
	if (!counts())
		return next.pvalloc(size);
	return SAMPLE_OUTER(CALLER_ADDRESS(), size, next.pvalloc(size));
}
