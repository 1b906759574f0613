/* Nanoseconds of a malloc/free pair, below so many frames, into a file: the least of some batches, in CPU time of the thread.
 * Arguments: frames, pairs of a batch, file; and "wait" to begin at the end of standard input. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define BATCHES 7

static void *volatile sink;

static double now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

__attribute__((noinline)) static double batch(int frames, long pairs)
{
	volatile char frame[32] = {(char)frames};

	if (frames > 0) {
		double result = batch(frames - 1, pairs);

		/* Read after the call, which is then none in tail position. */
		return result + frame[1];
	}
	double begin = now_ns();
	for (long i = 0; i < pairs; i++) {
		sink = malloc(64);
		free(sink);
	}
	return (now_ns() - begin) / (double)pairs;
}

int main(int argc, char **argv)
{
	double least = 1e18;

	if (argc != 4 && argc != 5)
		return 2;
	while (argc == 5 && getchar() != EOF)
		;
	for (int i = 0; i < BATCHES; i++) {
		double ns = batch(atoi(argv[1]), atol(argv[2]));

		least = ns < least ? ns : least;
	}
	FILE *file = fopen(argv[3], "w");
	fprintf(file, "%.1f\n", least);
	return fclose(file);
}
