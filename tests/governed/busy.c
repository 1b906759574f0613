/* Allocates in a loop and counts: `busy WORK [LEAK_EVERY [PAUSE_EVERY]]`. It makes pairs of calls at site_churn with WORK steps of
 * arithmetic between them; after every LEAK_EVERY pairs a block of site_leak that is never freed; after every PAUSE_EVERY pairs a sleep of
 * 1 ms. The number of pairs so far is in a shared page, so that a test can read it without stopping the program; the first line of output
 * names its file. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define SITE __attribute__((noipa))

SITE void *site_churn(size_t size) { return malloc(size); }
SITE void *site_leak(size_t size) { return malloc(size); }

static unsigned long work(unsigned long x, long steps)
{
	for (long i = 0; i < steps; i++)
		x = x * 6364136223846793005UL + 1442695040888963407UL;
	return x;
}

int main(int argc, char **argv)
{
	long steps = argc > 1 ? atol(argv[1]) : 0, leak_every = argc > 2 ? atol(argv[2]) : 0, pause_every = argc > 3 ? atol(argv[3]) : 0;
	int fd = memfd_create("pairs", 0);
	volatile unsigned long *pairs;
	unsigned long x = 1;

	if (fd < 0 || ftruncate(fd, 4096))
		return 1;
	pairs = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (pairs == MAP_FAILED)
		return 1;
	printf("/proc/%d/fd/%d\n", getpid(), fd);
	fflush(stdout);
	for (unsigned long n = 1;; n++) {
		char *block = site_churn(64 + (x >> 60));
		*(volatile char *)block = 1;
		x = work(x, steps);
		free(block);
		if (leak_every && n % leak_every == 0)
			*(volatile char *)site_leak(100) = 1;
		*pairs = n;
		if (pause_every && n % pause_every == 0)
			nanosleep(&(struct timespec){ .tv_nsec = 1000000 }, NULL);
	}
}
