/* Allocates a little and ends, without a rendezvous. */
#include "truth.h"

SITE struct block site_brief(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(void)
{
	for (size_t i = 0; i < 100; i++)
		if (i % 2)
			block_free(site_brief(50 + i));
		else
			site_brief(50 + i);
	return 0;
}
