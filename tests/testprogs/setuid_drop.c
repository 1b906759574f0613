/* Drops root privileges while running, after which its /proc files belong to root, and continues to allocate. */
#include "truth.h"
#include <grp.h>

SITE struct block site_as_root(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_as_nobody(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(void)
{
	truth_rendezvous("ready");
	for (size_t i = 0; i < 100; i++) {
		block_free(site_as_root(30 + i));
		site_as_root(40 + i);
	}
	REQUIRE(setgroups(0, NULL) == 0 && setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
	for (size_t i = 0; i < 100; i++) {
		block_free(site_as_nobody(50 + i));
		site_as_nobody(60 + i);
	}
	truth_rendezvous("done");
	return 0;
}
