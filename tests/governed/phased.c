/* Sites of known rates that are hard to estimate, per millisecond of the clock: `site_leak` one block of 100 bytes that is never freed;
 * `site_phase` 20 blocks of 256 bytes in every other half second, which live 30 ms, and none in between; `site_reuse` 60 blocks of 64
 * bytes, each freed before the next is allocated, so that all have one address; `site_churn` a thousand times the leak's bytes in equally
 * short-lived blocks of 4 KiB. It computes for half of the time, so that windows get the same budget on every machine. Prints a line per
 * second: the seconds so far. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "compute.h"
#include "ticks.h"

#define SITE __attribute__((noipa))
#define RING 30
#define PHASE 20

SITE void *site_leak(void) { return malloc(100); }
SITE void *site_phase(void) { return malloc(256); }
SITE void *site_reuse(void) { return malloc(64); }
SITE void *site_churn(void) { return malloc(4096); }

int main(int argc, char **argv)
{
	static void *phases[RING][PHASE];
	long seconds = argc > 1 ? atol(argv[1]) : 3600;
	struct timespec next;

	clock_gettime(CLOCK_MONOTONIC, &next);
	for (long tick = 0; tick < seconds * 1000; tick++) {
		*(volatile char *)site_leak() = 1;
		for (int i = 0; i < PHASE; i++) {
			free(phases[tick % RING][i]);
			phases[tick % RING][i] = tick / 500 % 2 ? NULL : site_phase();
		}
		for (int i = 0; i < 60; i++)
			free(site_reuse());
		for (int i = 0; i < 25; i++)
			free(site_churn());
		compute(500);
		end_tick(tick, &next);
	}
	return 0;
}
