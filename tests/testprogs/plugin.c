/* A library for dlopen. Built once without an allocator, and once with jemalloc linked in and local symbols: an allocator of its own. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* Runs before dlopen returns. */
__attribute__((constructor, noipa)) static void early_plugin(void)
{
	for (size_t i = 0; i < 64; i++) {
		char *volatile p = malloc(20 + i);
		free(p);
	}
}

__attribute__((noipa)) void *site_plugin_malloc(size_t n)
{
	void *p = malloc(n);
	memset(p, 1, n);
	return p;
}

__attribute__((noipa)) void *site_plugin_calloc(size_t count, size_t n)
{
	char *p = calloc(count, n);
	p[0] = 1;
	return p;
}

__attribute__((noipa)) void *site_plugin_realloc(void *old, size_t n)
{
	char *p = realloc(old, n);
	p[0] = 1;
	return p;
}

void plugin_free(void *p)
{
	free(p);
}
