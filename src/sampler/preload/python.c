/* Functions in front of those by which CPython allocates objects, put there by CPython's own interface for that (PyMem_SetAllocator in
 * Objects/obmalloc.c, since 3.4; it may be called before the interpreter is initialized). They pass each call on, and that is all: a probe
 * at them sees every call, also of an interpreter whose code has copies of its own functions. It uses those only where the table still
 * leads to the functions that they are copies of.
 *
 * Nothing is called but the interpreter, which a process that is no Python does not have. */
#include <stddef.h>

/* PyMemAllocatorEx, Include/cpython/pymem.h (3.8 to 3.14). */
struct allocator {
	void *ctx;
	void *(*malloc)(void *ctx, size_t size);
	void *(*calloc)(void *ctx, size_t count, size_t size);
	void *(*realloc)(void *ctx, void *block, size_t size);
	void (*free)(void *ctx, void *block);
};

/* PyMemAllocatorDomain: memory that is allocated with the interpreter's lock, in general and for objects. Both have the same functions. */
enum { DOMAIN_MEM = 1, DOMAIN_OBJ = 2, DOMAINS = 3 };

#define WEAK __attribute__((weak, visibility("default")))
#define PROBED __attribute__((noinline, visibility("default")))

extern WEAK void PyMem_GetAllocator(int domain, struct allocator *allocator);
extern WEAK void PyMem_SetAllocator(int domain, struct allocator *allocator);

/* What was there before, by domain: the context of the functions here. */
static struct allocator behind[DOMAINS];

PROBED void *fragprof_python_malloc(void *ctx, size_t size)
{
	struct allocator *next = ctx;

	return next->malloc(next->ctx, size);
}

PROBED void *fragprof_python_calloc(void *ctx, size_t count, size_t size)
{
	struct allocator *next = ctx;

	return next->calloc(next->ctx, count, size);
}

PROBED void *fragprof_python_realloc(void *ctx, void *block, size_t size)
{
	struct allocator *next = ctx;

	return next->realloc(next->ctx, block, size);
}

PROBED void fragprof_python_free(void *ctx, void *block)
{
	struct allocator *next = ctx;

	next->free(next->ctx, block);
}

__attribute__((constructor)) static void begin(void)
{
	if (!PyMem_GetAllocator || !PyMem_SetAllocator)
		return;
	for (int domain = DOMAIN_MEM; domain <= DOMAIN_OBJ; domain++) {
		struct allocator front = { &behind[domain], fragprof_python_malloc, fragprof_python_calloc, fragprof_python_realloc,
					   fragprof_python_free };

		PyMem_GetAllocator(domain, &behind[domain]);
		PyMem_SetAllocator(domain, &front);
	}
}
