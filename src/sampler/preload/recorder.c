/* The interposed functions of C, each call recorded. See record.h.
 *
 * An entry point of an allocator may call another by its name, which is interposed here too (musl's calloc calls malloc): the outermost call
 * is recorded. */
#include "next.h"
#include "record.h"

/* Nothing larger is ever allocated: no x86-64 or arm64 process has an address space of this size. */
#define NEVER_FITS_BYTES (1ull << 56)
/* The alignment of valloc. */
#define PAGE_BITS 12u

static bool records_alloc(void)
{
	return recording(false) && !record_is_inner();
}

static bool records_free(void)
{
	return recording(true) && !record_is_inner();
}

static uint32_t alignment_bits(size_t alignment)
{
	return alignment < 2 ? 0 : (uint32_t)(63 - __builtin_clzll(alignment));
}

/* Makes a call whose inner calls are not recorded, and records its block. */
#define RECORD_OUTER(size, how, function, call)                               \
	({                                                                    \
		void *pointer_;                                               \
                                                                              \
		this_thread.outer_sp = stack_pointer();                   \
		this_thread.inner_skipped = 0;                            \
		pointer_ = (call);                                            \
		this_thread.outer_sp = 0;                                 \
		if (likely(pointer_ != NULL))                                 \
			record_alloc(pointer_, (size), (how), (function), &CALLER()); \
		else                                                          \
			record_failed();                                      \
		pointer_;                                                     \
	})

EXPORT void *malloc(size_t size)
{
	void *pointer;

	if (unlikely(!records_alloc()))
		return next.malloc(size);
	pointer = next.malloc(size);
	if (likely(pointer != NULL))
		record_alloc(pointer, size, 0, (const void *)next.malloc, &CALLER());
	else
		record_failed();
	return pointer;
}

EXPORT void free(void *pointer)
{
	if (likely(pointer != NULL) && likely(records_free()))
		record_free(pointer, (const void *)next.free, &CALLER());
	next.free(pointer);
}

/* Exists in glibc before 2.26, and in mimalloc. */
EXPORT void cfree(void *pointer) __attribute__((alias("free")));

/* C23: frees with a hint that is only passed on. */
EXPORT void free_sized(void *pointer, size_t size)
{
	if (pointer != NULL && records_free())
		record_free(pointer, (const void *)next.free, &CALLER());
	next.free_sized(pointer, size);
}

EXPORT void free_aligned_sized(void *pointer, size_t alignment, size_t size)
{
	if (pointer != NULL && records_free())
		record_free(pointer, (const void *)next.free, &CALLER());
	next.free_aligned_sized(pointer, alignment, size);
}

EXPORT void *calloc(size_t count, size_t size)
{
	size_t total;

	if (!records_alloc() || __builtin_mul_overflow(count, size, &total))
		return next.calloc(count, size);
	return RECORD_OUTER(total, RECORD_ZEROED, (const void *)next.calloc, next.calloc(count, size));
}

static void *realloc_recorded(void *pointer, size_t size, const struct caller *caller)
{
	void *moved;

	/* Before the call: another thread may get the old address during it. With size 0 the block is freed, whatever is returned. */
	if (pointer != NULL && size != 0 && size < NEVER_FITS_BYTES)
		record_realloc_free(pointer);
	else if (pointer != NULL && size == 0)
		record_free(pointer, (const void *)next.realloc, caller);
	this_thread.outer_sp = stack_pointer();
	this_thread.inner_skipped = 0;
	moved = next.realloc(pointer, size);
	this_thread.outer_sp = 0;
	if (likely(moved != NULL)) {
		record_alloc(moved, size, 0, (const void *)next.realloc, caller);
		return moved;
	}
	if (size != 0)
		record_failed();
	if (pointer != NULL && size != 0 && size < NEVER_FITS_BYTES)
		record_realloc_fail(pointer);
	return NULL;
}

EXPORT void *realloc(void *pointer, size_t size)
{
	return records_alloc() ? realloc_recorded(pointer, size, &CALLER()) : next.realloc(pointer, size);
}

EXPORT void *reallocarray(void *pointer, size_t count, size_t size)
{
	size_t total;

	/* Too large: called only to fail in the libc's own way. */
	if (__builtin_mul_overflow(count, size, &total))
		return next.reallocarray(pointer, count, size);
	/* glibc's and musl's call realloc, which is interposed. */
	return records_alloc() ? realloc_recorded(pointer, total, &CALLER()) : next.realloc(pointer, total);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t size)
{
	int error;

	if (!records_alloc())
		return next.posix_memalign(out, alignment, size);
	RECORD_OUTER(size, alignment_bits(alignment), (const void *)next.posix_memalign,
		     (error = next.posix_memalign(out, alignment, size)) == 0 ? *out : NULL);
	return error;
}

EXPORT void *aligned_alloc(size_t alignment, size_t size)
{
	if (!records_alloc())
		return next.aligned_alloc(alignment, size);
	return RECORD_OUTER(size, alignment_bits(alignment), (const void *)next.aligned_alloc, next.aligned_alloc(alignment, size));
}

EXPORT void *memalign(size_t alignment, size_t size)
{
	if (!records_alloc())
		return next.memalign(alignment, size);
	return RECORD_OUTER(size, alignment_bits(alignment), (const void *)next.memalign, next.memalign(alignment, size));
}

EXPORT void *valloc(size_t size)
{
	if (!records_alloc())
		return next.valloc(size);
	return RECORD_OUTER(size, PAGE_BITS, (const void *)next.valloc, next.valloc(size));
}

EXPORT void *pvalloc(size_t size)
{
	if (!records_alloc())
		return next.pvalloc(size);
	return RECORD_OUTER(size, PAGE_BITS, (const void *)next.pvalloc, next.pvalloc(size));
}
