/* Times allocations and their frees separately at a depth of 20 frames, in CPU time of the thread: prints "ns ALLOC FREE SAMPLES" per block
 * and the number of blocks sampled in a million. Argument: number of blocks. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* As in src/sampler/preload/sample.h; absent without the sampler. */
struct stats {
	uint32_t magic, size_bytes;
	uint64_t sample_bytes, in_front, samples;
};
extern struct stats fragprof_sampler_stats __attribute__((weak));

static uint64_t samples(void)
{
	return &fragprof_sampler_stats != NULL ? __atomic_load_n(&fragprof_sampler_stats.samples, __ATOMIC_RELAXED) : 0;
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

#define ROUND 1000
/* As many bytes as the mean distance of samples that the benchmark requests: two of three are sampled, at 1.6 points each. */
#define BLOCK_BYTES 1024

static double alloc_ns, free_ns;

__attribute__((noinline)) static int work(int depth, long count)
{
	static void *blocks[ROUND];

	if (depth > 0)
		return work(depth - 1, count) + 1;
	for (long done = 0; done < count; done += ROUND) {
		double start = now(), middle;

		for (int i = 0; i < ROUND; i++)
			blocks[i] = malloc(BLOCK_BYTES);
		middle = now();
		for (int i = 0; i < ROUND; i++)
			free(blocks[i]);
		alloc_ns += middle - start;
		free_ns += now() - middle;
	}
	return 0;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 100000;
	uint64_t before;
	char command;

	puts("ready");
	fflush(stdout);
	if (read(0, &command, 1) != 1)
		return 1;
	/* The first ones, which are new to the listener and the caches, are not timed. */
	work(14, 10 * ROUND);
	alloc_ns = free_ns = 0;
	before = samples();
	/* malloc, the sampler's two and main are frames too. */
	work(14, count);
	printf("ns %.1f %.1f %.1f\n", alloc_ns / (double)count, free_ns / (double)count, 1e6 * (double)(samples() - before) / (double)count);
	return 0;
}
