/* Opens every library of a directory, all copies of the plugin, and allocates through each. Argument: the directory. */
#include "truth.h"
#include <dirent.h>
#include <dlfcn.h>

#define LIBRARIES_MAX 512

int main(int argc, char **argv)
{
	static void *(*plugin_malloc[LIBRARIES_MAX])(size_t);
	int count = 0;
	DIR *dir = opendir(argc > 1 ? argv[1] : ".");
	REQUIRE(dir);
	for (struct dirent *entry; (entry = readdir(dir));) {
		char path[4096];
		if (entry->d_name[0] == '.')
			continue;
		snprintf(path, sizeof path, "%s/%s", argv[1], entry->d_name);
		void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
		REQUIRE(library && count < LIBRARIES_MAX);
		plugin_malloc[count++] = (void *(*)(size_t))dlsym(library, "site_plugin_malloc");
	}
	closedir(dir);
	truth_rendezvous("ready");
	for (int i = 0; i < count; i++) {
		size_t n = 100 + (size_t)i;
		block_free(truth_took_by("site_plugin_malloc", plugin_malloc[i](n), n));
		truth_took_by("site_plugin_malloc", plugin_malloc[i](2 * n), 2 * n);
	}
	truth_rendezvous("done");
	return 0;
}
