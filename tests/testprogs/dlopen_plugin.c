/*
 * Opens a library while running and allocates through it. Arguments: the library, and "close" to close it when all its blocks are
 * freed.
 */
#include "truth.h"
#include <dlfcn.h>

SITE struct block site_main(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(int argc, char **argv)
{
	int closes = argc > 2 && strcmp(argv[2], "close") == 0;
	REQUIRE(argc > 1);
	truth_rendezvous("ready");
	for (size_t i = 0; i < 100; i++)
		site_main(50 + i);
	void *library = dlopen(argv[1], RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		truth_fail("dlopen");
	}
	void *(*plugin_malloc)(size_t) = (void *(*)(size_t))dlsym(library, "site_plugin_malloc");
	void *(*plugin_calloc)(size_t, size_t) = (void *(*)(size_t, size_t))dlsym(library, "site_plugin_calloc");
	void *(*plugin_realloc)(void *, size_t) = (void *(*)(void *, size_t))dlsym(library, "site_plugin_realloc");
	void (*plugin_free)(void *) = (void (*)(void *))dlsym(library, "plugin_free");
	REQUIRE(plugin_malloc && plugin_calloc && plugin_realloc && plugin_free);
	truth_rendezvous("opened");
	for (size_t i = 0; i < 100; i++) {
		struct block a = truth_took_by("site_plugin_malloc", plugin_malloc(100 + i), 100 + i);
		struct block b = truth_took_by("site_plugin_calloc", plugin_calloc(3, 70 + i), 3 * (70 + i));
		struct block c = truth_took_by("site_plugin_malloc", plugin_malloc(30), 30);
		truth_strike(c);
		c = truth_took_by("site_plugin_realloc", plugin_realloc(c.ptr, 2000 + i), 2000 + i);
		if (closes || i % 2) {
			truth_strike(a);
			plugin_free(a.ptr);
		}
		if (closes || i % 3) {
			truth_strike(b);
			plugin_free(b.ptr);
		}
		if (closes || i % 5) {
			truth_strike(c);
			plugin_free(c.ptr);
		}
		block_free(site_main(1000));
	}
	if (closes)
		REQUIRE(dlclose(library) == 0);
	for (size_t i = 0; i < 100; i++)
		site_main(500 + i);
	truth_rendezvous("done");
	/* jemalloc in a closed library leaves destructors behind: end without running them. */
	_exit(0);
}
