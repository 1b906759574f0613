/* Times allocations and their frees at the depth of 20 frames, apart, in CPU time of the thread: prints "ns ALLOC FREE". Argument: how many. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

#define ROUND 1000

static double alloc_ns, free_ns;

__attribute__((noinline)) static int work(int depth, long count)
{
	static void *blocks[ROUND];

	if (depth > 0)
		return work(depth - 1, count) + 1;
	for (long done = 0; done < count; done += ROUND) {
		double start = now(), middle;

		for (int i = 0; i < ROUND; i++)
			blocks[i] = malloc(100);
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
	char command;

	puts("ready");
	fflush(stdout);
	if (read(0, &command, 1) != 1)
		return 1;
	/* malloc, the sampler's two and main are frames too. */
	work(14, count);
	printf("ns %.1f %.1f\n", alloc_ns / (double)count, free_ns / (double)count);
	return 0;
}
