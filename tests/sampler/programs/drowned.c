/* A leak beside churn, each at a place of its own. Arguments: seconds, MB/s that leak, MiB/s that are freed at once. At the end it writes the
 * leaked bytes to standard output and waits for its input to end. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define LEAKED_BYTES 200
#define CHURNED_BYTES 4000

static double now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

__attribute__((noinline)) void leak(void)
{
	char *volatile block = malloc(LEAKED_BYTES);

	block[0] = 1;
}

__attribute__((noinline)) void churn(void)
{
	char *volatile block = malloc(CHURNED_BYTES);

	block[0] = 1;
	free(block);
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 10, leak_rate = argc > 2 ? atof(argv[2]) * 1e6 : 0.8e6;
	double churn_rate = argc > 3 ? atof(argv[3]) * 1048576 : 2900 * 1048576.0, leaked = 0, churned = 0;
	char byte;

	if (read(0, &byte, 1) != 1)
		return 1;
	double begun = now();
	for (double at = 0; at < seconds; at = now() - begun) {
		for (; leaked < at * leak_rate; leaked += LEAKED_BYTES)
			leak();
		/* Where the machine is too slow for the rate, as much as it can. */
		for (int i = 0; i < 256 && churned < at * churn_rate; i++, churned += CHURNED_BYTES)
			churn();
	}
	dprintf(1, "%.0f %.0f\n", leaked, churned);
	return read(0, &byte, 1) < 0;
}
