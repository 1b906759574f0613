/* A typical other preload library: it calls dlsym, which itself may call calloc, and wraps a few functions. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdlib.h>

static void *(*next_malloc)(size_t);
static void *(*next_realloc)(void *, size_t);
static void (*next_free)(void *);
static _Atomic unsigned long calls;

void *malloc(size_t size)
{
	if (!next_malloc)
		next_malloc = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
	calls++;
	return next_malloc(size);
}

/* Calls the public names, as debugging wrappers do. */
void *calloc(size_t count, size_t size)
{
	char *p;
	size_t total;

	if (__builtin_mul_overflow(count, size, &total))
		return NULL;
	p = malloc(total);
	for (size_t i = 0; p && i < total; i++)
		p[i] = 0;
	return p;
}

void *realloc(void *pointer, size_t size)
{
	if (!next_realloc)
		next_realloc = (void *(*)(void *, size_t))dlsym(RTLD_NEXT, "realloc");
	return next_realloc(pointer, size);
}

void free(void *pointer)
{
	if (!next_free)
		next_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
	next_free(pointer);
}
