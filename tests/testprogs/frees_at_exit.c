/* Frees all of its blocks and ends at once, so that it has many last records. */
#include "truth.h"

enum { BLOCKS = 30000 };

SITE struct block site_until_exit(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static struct block blocks[BLOCKS];

int main(void)
{
	for (size_t i = 0; i < BLOCKS; i++)
		blocks[i] = site_until_exit(24);
	for (size_t i = 0; i < BLOCKS; i++)
		block_free(blocks[i]);
	return 0;
}
