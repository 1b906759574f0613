/* Keeps some blocks, prints the ledger, and allocates and frees until it is killed. */
#include "truth.h"

SITE struct block site_kept(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block spin(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(void)
{
	truth_rendezvous("ready");
	for (size_t i = 0; i < 500; i++) {
		struct block b = site_kept(100 + i);
		if (i % 2)
			block_free(b);
	}
	truth_tell("spinning", "");
	for (size_t i = 0;; i++)
		block_free(spin(16 + i % 500));
}
