/* The clock of a program that does the same in each millisecond. */
#include <stdio.h>
#include <time.h>

/* Ends a tick: prints a line per second, and sleeps until the next millisecond after `next`, which moves on. A late program catches up. */
static void end_tick(long tick, struct timespec *next)
{
	if (tick % 1000 == 0) {
		printf("%ld\n", tick / 1000);
		fflush(stdout);
	}
	next->tv_nsec += 1000000;
	if (next->tv_nsec >= 1000000000) {
		next->tv_nsec -= 1000000000;
		next->tv_sec++;
	}
	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, next, NULL);
}
