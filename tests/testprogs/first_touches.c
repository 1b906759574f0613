/* Writes into each page of a new block of 16 MiB in each round, which the test starts, and keeps the block. Without huge pages: one fault
 * a page. */
#include <sys/prctl.h>

#include "truth.h"

#define BLOCK (16UL << 20)

SITE void site_touch(volatile char *block)
{
	for (size_t at = 0; at < BLOCK; at += 4096)
		block[at] = 1;
}

int main(void)
{
	prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);
	truth_rendezvous("ready");
	for (;;) {
		site_touch(malloc(BLOCK));
		truth_rendezvous("round");
	}
}
