/*
 * A service: it answers requests all the time, and has a peak of load now and then, whose memory it frees but for every eighth block. It runs
 * until its standard input ends, and then prints how long its requests took, as one line of JSON.
 *
 * Usage: service SECONDS-BETWEEN-PEAKS SECONDS-OF-A-PEAK MIB-OF-A-PEAK
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK_BYTES = 9000, A_REQUEST = 40, BUCKETS = 64 * 16 };

/* Durations by the logarithm of their nanoseconds, sixteen buckets for each doubling. */
static unsigned long buckets[BUCKETS];
static unsigned long requests;
static double longest_s;

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static void count(double seconds)
{
	uint64_t ns = (uint64_t)(seconds * 1e9) | 16;
	int high = 63 - __builtin_clzll(ns);
	buckets[high * 16 + ((ns >> (high - 4)) & 15)]++;
	requests++;
	if (seconds > longest_s)
		longest_s = seconds;
}

static double percentile(double share)
{
	unsigned long left = (unsigned long)(requests * share);
	for (int i = 0; i < BUCKETS; i++) {
		if (buckets[i] > left)
			return (double)(16 + i % 16) * (double)(1ull << (i / 16)) / 16 / 1e9;
		left -= buckets[i];
	}
	return longest_s;
}

static void request(void)
{
	char *parts[A_REQUEST];
	double begun = now_s();
	for (int i = 0; i < A_REQUEST; i++) {
		size_t bytes = 100 + (i * 977) % 4000;
		parts[i] = malloc(bytes);
		memset(parts[i], i, bytes);
	}
	for (int i = 0; i < A_REQUEST; i++)
		free(parts[i]);
	count(now_s() - begun);
}

int main(int argc, char **argv)
{
	double between_s = argc > 1 ? atof(argv[1]) : 60, peak_s = argc > 2 ? atof(argv[2]) : 5;
	size_t blocks_count = ((argc > 3 ? strtoul(argv[3], NULL, 10) : 64) << 20) / BLOCK_BYTES;
	char **blocks = calloc(blocks_count, sizeof *blocks);
	unsigned long peaks = 0;
	int is_peak = 0;
	double next_s = now_s();
	mallopt(M_MMAP_THRESHOLD, 1 << 30);
	printf("ready\n");
	fflush(stdout);
	struct pollfd in = { 0, POLLIN | POLLHUP, 0 };
	while (poll(&in, 1, 2) == 0) {
		request();
		if (now_s() < next_s)
			continue;
		for (size_t i = 0; i < blocks_count; i++) {
			if (!is_peak && !blocks[i]) {
				blocks[i] = malloc(BLOCK_BYTES);
				memset(blocks[i], 1, BLOCK_BYTES);
			} else if (is_peak && i % 8) {
				free(blocks[i]);
				blocks[i] = NULL;
			}
		}
		peaks += !is_peak;
		next_s = now_s() + (is_peak ? between_s : peak_s);
		is_peak = !is_peak;
	}
	printf("{\"requests\":%lu,\"peaks\":%lu,\"p50_s\":%.6f,\"p99_s\":%.6f,\"longest_s\":%.6f}\n", requests, peaks, percentile(0.5),
	       percentile(0.99), longest_s);
	return 0;
}
