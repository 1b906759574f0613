/*
 * The target of the exact mode's cost figures: threads that do nothing but allocate and free one small block at a time, of 64 to 127
 * bytes in turn, so that every nanosecond a probe costs shows.
 *
 *     tight_pairs THREADS SECONDS
 *
 * Prints `ready PID`. Then each line of standard input starts one measurement of SECONDS on all threads at once, answered by
 *
 *     {"threads":2,"seconds":1.000123,"pairs":12345678,"ns_per_pair":81.0}
 *
 * where ns_per_pair is wall time x threads / pairs: what one thread waits for one pair. Ends with its input. The same process is
 * measured before, while and after it is probed, so that a ratio compares like with like:
 *
 *     cc -O2 -pthread -fno-builtin tight_pairs.c -o tight_pairs && echo | ./tight_pairs 1 1
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

/* The figures are for two cores; more threads are allowed, up to a bound for the table below. */
#define THREADS_MAX 64

/* Pairs between checks of the stop flag: a check is one load, negligible next to 64 pairs. It is also one round of the sizes. */
#define BATCH_PAIRS 64

struct worker {
	pthread_t thread;
	uint64_t pairs;
	/* A cache line of its own, so that the threads' counters do not share one. */
	char apart[128];
};

static struct worker workers[THREADS_MAX];
static pthread_barrier_t start, end;
static int stop;

/* The block's only use: keeps the compiler from removing the pair. */
static void escape(void *block)
{
	__asm__ volatile("" : : "r"(block) : "memory");
}

static void *work(void *arg)
{
	struct worker *self = arg;
	for (;;) {
		uint64_t pairs = 0;
		pthread_barrier_wait(&start);
		while (!__atomic_load_n(&stop, __ATOMIC_RELAXED)) {
			for (size_t i = 0; i < BATCH_PAIRS; i++) {
				void *block = malloc(64 + i);
				escape(block);
				free(block);
			}
			pairs += BATCH_PAIRS;
		}
		self->pairs = pairs;
		pthread_barrier_wait(&end);
	}
	return NULL;
}

static double now_s(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
	int threads = argc > 2 ? atoi(argv[1]) : 0;
	double seconds = argc > 2 ? atof(argv[2]) : 0;
	int c;
	if (threads < 1 || threads > THREADS_MAX || !(seconds > 0 && seconds <= 3600)) {
		fprintf(stderr, "usage: tight_pairs THREADS(1-%d) SECONDS\n", THREADS_MAX);
		return 2;
	}
	/* No allocation but the measured ones. */
	setvbuf(stdout, NULL, _IONBF, 0);
	setvbuf(stdin, NULL, _IONBF, 0);
	pthread_barrier_init(&start, NULL, (unsigned)threads + 1);
	pthread_barrier_init(&end, NULL, (unsigned)threads + 1);
	for (int i = 0; i < threads; i++)
		if (pthread_create(&workers[i].thread, NULL, work, &workers[i])) {
			perror("pthread_create");
			return 1;
		}
	printf("ready %d\n", (int)getpid());
	while ((c = getchar()) != EOF) {
		struct timespec pause = { (time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9) };
		uint64_t pairs = 0;
		double began, took;
		if (c != '\n')
			continue;
		__atomic_store_n(&stop, 0, __ATOMIC_RELAXED);
		pthread_barrier_wait(&start);
		began = now_s();
		while (nanosleep(&pause, &pause) != 0)
			;
		__atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
		pthread_barrier_wait(&end);
		took = now_s() - began;
		for (int i = 0; i < threads; i++)
			pairs += workers[i].pairs;
		printf("{\"threads\":%d,\"seconds\":%.6f,\"pairs\":%llu,\"ns_per_pair\":%.1f}\n", threads, took, (unsigned long long)pairs,
		       took * 1e9 * threads / (double)(pairs ? pairs : 1));
	}
	return 0;
}
