/* Sites of known rates: in every millisecond of the clock `site_short` allocates 20 blocks of 64 bytes that live 2 ms, `site_middle` 4
 * blocks of 256 bytes that live 50 ms, `site_kept` one block of 512 bytes that is never freed. Prints a line per second: the blocks
 * allocated so far by each. `paced [FACTOR [SECONDS [COMPUTES]]]`: FACTOR multiplies the blocks, COMPUTES are microseconds of other work
 * in each millisecond. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "compute.h"
#include "ticks.h"

#define SITE __attribute__((noipa))
#define RING 50

SITE void *site_short(void) { return malloc(64); }
SITE void *site_middle(void) { return malloc(256); }
SITE void *site_kept(void) { return malloc(512); }

int main(int argc, char **argv)
{
	long computes_us = argc > 3 ? atol(argv[3]) : 0;
	static void *shorts[2][64], *middles[RING][64];
	long factor = argc > 1 ? atol(argv[1]) : 1, seconds = argc > 2 ? atol(argv[2]) : 3600;
	struct timespec next;

	clock_gettime(CLOCK_MONOTONIC, &next);
	for (long tick = 0; tick < seconds * 1000; tick++) {
		for (int i = 0; i < 20 * factor && i < 64; i++) {
			free(shorts[tick % 2][i]);
			shorts[tick % 2][i] = site_short();
		}
		for (int i = 0; i < 4 * factor && i < 64; i++) {
			free(middles[tick % RING][i]);
			middles[tick % RING][i] = site_middle();
		}
		for (int i = 0; i < factor; i++)
			memset(site_kept(), 1, 512);
		compute(computes_us);
		end_tick(tick, &next);
	}
	return 0;
}
