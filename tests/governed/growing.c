/* Lets its heap grow and touches it on request: answers each line of input with a number of nanoseconds of CPU time. `touch`: per first
 * touch of a page, over 64 MiB of new pages. `brk`: per growth of the heap by 132 KiB, as malloc does it, over 400 of them. */
#define _GNU_SOURCE
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096L
#define TOUCHED (64L << 20)
#define GROWTHS 400

static double cpu_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
	return now.tv_sec * 1e9 + now.tv_nsec;
}

static double touch(void)
{
	char *block = malloc(TOUCHED);
	double began = cpu_ns(), took;

	for (long at = 0; at < TOUCHED; at += PAGE)
		((volatile char *)block)[at] = 1;
	took = cpu_ns() - began;
	free(block);
	return took / (TOUCHED / PAGE);
}

static double grow(void)
{
	double began = cpu_ns(), took;

	for (int i = 0; i < GROWTHS; i++)
		sbrk(132 << 10);
	took = cpu_ns() - began;
	sbrk(-GROWTHS * (132L << 10));
	return took / GROWTHS;
}

int main(void)
{
	char line[16];

	/* Every block comes from the break. */
	mallopt(M_MMAP_THRESHOLD, 128 << 20);
	while (fgets(line, sizeof(line), stdin)) {
		printf("%s %.1f\n", strcmp(line, "brk\n") ? "touch" : "brk", strcmp(line, "brk\n") ? touch() : grow());
		fflush(stdout);
	}
	return 0;
}
