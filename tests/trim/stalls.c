/*
 * Threads with an arena each, that take their arena's lock all the time and measure for how long they wait. It answers commands: "fill" makes
 * free pages in each arena and forgets what was measured ("ready"), "print" gives the longest wait by arena as one line of JSON.
 *
 * Usage: stalls THREADS MIB-EACH
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { BLOCK_BYTES = 9000, THREADS_MAX = 16, HEAP_BYTES = 64 << 20 };

static struct worker {
	pthread_t thread;
	size_t count;
	char **blocks;
	uintptr_t arena;
	atomic_ulong longest_ns;
	atomic_int is_wanted;
} workers[THREADS_MAX];

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void fill(struct worker *own)
{
	for (size_t i = 0; i < own->count; i++) {
		if (own->blocks[i] && i % 8 == 0)
			continue;
		own->blocks[i] = malloc(BLOCK_BYTES);
		memset(own->blocks[i], 1, BLOCK_BYTES);
	}
	for (size_t i = 0; i < own->count; i++)
		if (i % 8)
			free(own->blocks[i]);
}

static void *work(void *argument)
{
	struct worker *own = argument;
	own->blocks = calloc(own->count, sizeof *own->blocks);
	fill(own);
	/* The first word of a heap is its arena's address (glibc, malloc/arena.c, struct _heap_info). */
	own->arena = *(uintptr_t *)((uintptr_t)own->blocks[0] & ~(uintptr_t)(HEAP_BYTES - 1));
	own->is_wanted = 0;
	for (;;) {
		if (own->is_wanted) {
			fill(own);
			own->longest_ns = 0;
			own->is_wanted = 0;
		}
		uint64_t begun = now_ns();
		/* Larger than what thread caches hold: it takes the lock. */
		char *volatile block = malloc(2000);
		uint64_t took = now_ns() - begun;
		free(block);
		if (took > own->longest_ns)
			own->longest_ns = took;
		usleep(100);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 2;
	size_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 48;
	mallopt(M_MMAP_THRESHOLD, 1 << 30);
	for (int i = 0; i < count && i < THREADS_MAX; i++) {
		workers[i].count = (mib << 20) / BLOCK_BYTES;
		workers[i].is_wanted = 1;
		pthread_create(&workers[i].thread, NULL, work, &workers[i]);
		/* One after the other, so that each gets an arena of its own. */
		while (workers[i].is_wanted)
			usleep(1000);
	}
	printf("ready\n");
	fflush(stdout);
	static char line[64];
	while (fgets(line, sizeof line, stdin)) {
		if (!strncmp(line, "fill", 4)) {
			for (int i = 0; i < count; i++)
				workers[i].is_wanted = 1;
			for (int i = 0; i < count; i++)
				while (workers[i].is_wanted)
					usleep(1000);
			printf("ready\n");
		} else {
			printf("[");
			for (int i = 0; i < count; i++)
				printf("%s{\"address\":%lu,\"longest_s\":%.6f}", i ? "," : "", (unsigned long)workers[i].arena, workers[i].longest_ns / 1e9);
			printf("]\n");
		}
		fflush(stdout);
	}
	return 0;
}
