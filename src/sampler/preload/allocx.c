/* jemalloc's own interface: mallocx and its kin.
 *
 * Only the library's second build has these: programs ask for them weakly to learn whether jemalloc is there (`if (mallocx)`), so
 * nothing may define them in a process without jemalloc. The sizes and flags are only passed on; sallocx and nallocx change nothing and
 * are not touched. xallocx resizes in place: a sampled block stays sampled with its old size. */
#include "next.h"
#include "sample.h"

static void *(*next_mallocx)(size_t size, int flags);
static void *(*next_rallocx)(void *pointer, size_t size, int flags);
static void (*next_dallocx)(void *pointer, int flags);
static void (*next_sdallocx)(void *pointer, size_t size, int flags);

void allocx_resolve(void)
{
	next_rallocx = next_definition("rallocx").address;
	next_dallocx = next_definition("dallocx").address;
	next_sdallocx = next_definition("sdallocx").address;
	next_mallocx = next_definition("mallocx").address;
	/* The launcher chooses this build only where they are. */
	if (next_mallocx == NULL || next_rallocx == NULL || next_dallocx == NULL || next_sdallocx == NULL)
		__builtin_trap();
}

static void ensure_resolved(void)
{
	if (unlikely(next_mallocx == NULL))
		next_resolve();
}

EXPORT void *mallocx(size_t size, int flags)
{
	void *pointer;
	int64_t left;

	ensure_resolved();
	if (!listening_alloc())
		return next_mallocx(size, flags);
	pointer = next_mallocx(size, flags);
	if (pointer == NULL)
		return NULL;
	left = (int64_t)((uint64_t)sampler_thread.left_bytes - size);
	sampler_thread.left_bytes = left;
	if (unlikely(left < 0))
		sample(pointer, size);
	return pointer;
}

EXPORT void *rallocx(void *pointer, size_t size, int flags)
{
	struct sampled sampled;
	bool taken;
	void *moved;

	ensure_resolved();
	taken = listening_free() && set_may_hold(pointer) && sample_take(pointer, &sampled);
	moved = next_rallocx(pointer, size, flags);
	if (moved == NULL) {
		if (taken)
			sample_put_back(pointer, sampled);
		return NULL;
	}
	if (listening_alloc()) {
		sampler_thread.left_bytes = (int64_t)((uint64_t)sampler_thread.left_bytes - size);
		if (unlikely(sampler_thread.left_bytes < 0))
			sample(moved, size);
	}
	return moved;
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
