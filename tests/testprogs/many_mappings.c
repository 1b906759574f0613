/* A process with many mappings between two rendezvous and after: every other page has a different protection, so that they do not
 * merge.
 *   many_mappings COUNT */
#include "truth.h"
#include <sys/mman.h>

SITE struct block site_among(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(int argc, char **argv)
{
	size_t count = argc > 1 ? (size_t)atoi(argv[1]) : 20000;
	char *area = mmap(NULL, count * 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	REQUIRE(area != MAP_FAILED);
	for (size_t i = 0; i < count; i += 2)
		REQUIRE(mprotect(area + i * 4096, 4096, i % 4 ? PROT_READ | PROT_WRITE : PROT_READ | PROT_EXEC) == 0);
	truth_rendezvous("ready");
	for (size_t i = 0; i < 2000; i++) {
		struct block b = site_among(32 + i % 300);
		if (i % 3)
			block_free(b);
	}
	truth_rendezvous("done");
	return 0;
}
