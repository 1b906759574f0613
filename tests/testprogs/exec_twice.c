/* Allocates, replaces its own image, and allocates again: the first heap no longer exists, and the second starts empty. */
#include "truth.h"

SITE struct block site_first(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_second(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(int argc, char **argv)
{
	if (argc > 1 && strcmp(argv[1], "second") == 0) {
		truth_rendezvous("second_ready");
		for (size_t i = 0; i < 300; i++) {
			struct block b = site_second(40 + i);
			if (i % 3)
				block_free(b);
		}
		truth_rendezvous("done");
		return 0;
	}
	truth_rendezvous("ready");
	for (size_t i = 0; i < 300; i++) {
		struct block b = site_first(70 + i);
		if (i % 2)
			block_free(b);
	}
	truth_rendezvous("before_exec");
	execl("/proc/self/exe", argv[0], "second", (char *)NULL);
	truth_fail("exec");
}
