/* Measures how long a malloc/free pair takes, once for each byte from the test: the best of several batches. */
#include "truth.h"
#include <time.h>

#define BATCHES 10
#define PAIRS 20000

SITE struct block site_pair(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static double now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

int main(void)
{
	truth_rendezvous("ready");
	for (;;) {
		char extra[64];
		double best = 1e18;
		for (int batch = 0; batch < BATCHES; batch++) {
			double start = now_ns();
			for (size_t i = 0; i < PAIRS; i++)
				block_free(site_pair(64 + i % 64));
			double ns = (now_ns() - start) / PAIRS;
			if (ns < best)
				best = ns;
		}
		snprintf(extra, sizeof extra, ",\"pair_ns\":%.1f", best);
		truth_tell("speed", extra);
		truth_await();
	}
}
