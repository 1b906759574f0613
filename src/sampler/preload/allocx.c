/* jemalloc's own interface: mallocx and related functions.
 *
 * Only the library's second build has these: programs use weak references to them to detect jemalloc (`if (mallocx)`), so nothing may
 * define them in a process without jemalloc. The sizes and flags are only passed on; sallocx and nallocx change nothing and are not
 * interposed. */
#include "next.h"
#ifdef FRAGPROF_ATTACHED
#include "attach.h"
#endif
#ifdef FRAGPROF_RECORDER
#include "record.h"
#else
#include "sample.h"
#endif

/* The substitutes ignore arguments that are only hints. */
#pragma GCC diagnostic ignored "-Wunused-parameter"

static void *(*next_mallocx)(size_t size, int flags);
static void *(*next_rallocx)(void *pointer, size_t size, int flags);
static size_t (*next_xallocx)(void *pointer, size_t size, size_t extra, int flags);
static void (*next_dallocx)(void *pointer, int flags);
static void (*next_sdallocx)(void *pointer, size_t size, int flags);

/* Substitutes for processes without jemalloc: a program with jemalloc may start others, which inherit the library. They find the names
 * defined, and may call them, so the functions must work. A flag's low six bits are log2 of the alignment, 0x40 requests zeroes
 * (jemalloc 5's MALLOCX_LG_ALIGN and MALLOCX_ZERO). */
#define MALLOCX_LG_ALIGN_MASK 0x3f
#define MALLOCX_ZERO 0x40

static size_t (*next_usable_size)(void *pointer);

static void *mallocx_by_memalign(size_t size, int flags)
{
	size_t alignment = (size_t)1 << (flags & MALLOCX_LG_ALIGN_MASK);
	volatile char *pointer = next.memalign(alignment < 16 ? 16 : alignment, size);

	if (pointer != NULL && (flags & MALLOCX_ZERO))
		for (size_t i = 0; i < size; i++)
			pointer[i] = 0;
	return (void *)pointer;
}

static void *rallocx_by_mallocx(void *pointer, size_t size, int flags)
{
	size_t old_size = next_usable_size != NULL ? next_usable_size(pointer) : 0;
	volatile char *moved = mallocx_by_memalign(size, flags);

	if (moved == NULL)
		return NULL;
	for (size_t i = 0; i < old_size && i < size; i++)
		moved[i] = ((char *)pointer)[i];
	next.free(pointer);
	return (void *)moved;
}

static size_t xallocx_never(void *pointer, size_t size, size_t extra, int flags)
{
	return next_usable_size != NULL ? next_usable_size(pointer) : 0;
}

static void dallocx_by_free(void *pointer, int flags)
{
	next.free(pointer);
}

static void sdallocx_by_free(void *pointer, size_t size, int flags)
{
	next.free(pointer);
}

void allocx_resolve(void)
{
	if (next_definition("mallocx").address == NULL) {
		next_usable_size = next_definition("malloc_usable_size").address;
		next_rallocx = rallocx_by_mallocx;
		next_xallocx = xallocx_never;
		next_dallocx = dallocx_by_free;
		next_sdallocx = sdallocx_by_free;
		next_mallocx = mallocx_by_memalign;
		return;
	}
	next_rallocx = next_definition("rallocx").address;
	next_xallocx = next_definition("xallocx").address;
	next_dallocx = next_definition("dallocx").address;
	next_sdallocx = next_definition("sdallocx").address;
	next_mallocx = next_definition("mallocx").address;
}

static void ensure_resolved(void)
{
	if (unlikely(next_mallocx == NULL))
		next_resolve();
}

EXPORT void *mallocx(size_t size, int flags)
{
	ensure_resolved();
	if (listening_alloc())
		return SAMPLE_INNER(size, next_mallocx(size, flags));
	return next_mallocx(size, flags);
}

EXPORT void *rallocx(void *pointer, size_t size, int flags)
{
	struct sampled sampled;
	bool taken;
	void *moved;

	ensure_resolved();
	taken = listening_free() && set_may_hold(pointer) && sample_take(pointer, &sampled);
	moved = listening_alloc() ? SAMPLE_INNER(size, next_rallocx(pointer, size, flags)) : next_rallocx(pointer, size, flags);
	if (taken && moved == NULL)
		sample_put_back(pointer, sampled);
	return moved;
}

/* Resizes in place or not at all. The block belongs to the program all the time, so it can be reported afterwards. */
EXPORT size_t xallocx(void *pointer, size_t size, size_t extra, int flags)
{
	size_t now;

	ensure_resolved();
	now = next_xallocx(pointer, size, extra, flags);
	if (now < size)
		return now;
	if (listening_free() && set_may_hold(pointer))
		sample_free(pointer);
	if (listening_alloc())
		sample_count(pointer, size);
	return now;
}

EXPORT void dallocx(void *pointer, int flags)
{
	ensure_resolved();
	if (listening_free() && set_may_hold(pointer))
		sample_free(pointer);
	next_dallocx(pointer, flags);
}

EXPORT void sdallocx(void *pointer, size_t size, int flags)
{
	ensure_resolved();
	if (listening_free() && set_may_hold(pointer))
		sample_free(pointer);
	next_sdallocx(pointer, size, flags);
}

#ifdef FRAGPROF_ATTACHED
void allocx_each(attach_function *each)
{
	if (next_mallocx == mallocx_by_memalign)
		return;
	each("mallocx", mallocx, next_mallocx);
	each("rallocx", rallocx, next_rallocx);
	each("xallocx", xallocx, next_xallocx);
	each("dallocx", dallocx, next_dallocx);
	each("sdallocx", sdallocx, next_sdallocx);
}
#endif
