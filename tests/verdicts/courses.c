/*
 * Memory use with a given course over time, until the input ends. On `account` it prints the bytes that malloc itself counts as in use
 * (mallinfo2: arenas and mapped blocks), on `trim` it calls malloc_trim.
 *
 * Usage: courses leak|slow|lru|sawtooth|memtable|mappings|stacks|bloat [MIB_PER_SECOND]
 *
 * The course follows the clock, not a number of steps: on a busy machine a sawtooth keeps its period, and only its steps become larger.
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { MIB = 1 << 20, BLOCK = 1000, BASE_BLOCKS = 20 * 1000, MANY = 1 << 20, STACKS = 64, STACK_BYTES = 2 * MIB };
/* Number of blocks in the LRU cache. */
enum { CACHE_BLOCKS = 40 * 1000 };

static char *blocks[MANY];
static size_t kept;

static double now(void)
{
	struct timespec at;
	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static char *touched(size_t bytes)
{
	char *block = malloc(bytes);
	if (!block)
		abort();
	memset(block, 1, bytes);
	return block;
}

static void keep_until(size_t count)
{
	while (kept < count && kept < MANY)
		blocks[kept++] = touched(BLOCK);
}

static void drop_until(size_t count)
{
	while (kept > count)
		free(blocks[--kept]);
}

/* Blocks for a growth of `mib` MiB per second. */
static size_t climbed(double seconds, double mib)
{
	return (size_t)(seconds * mib * MIB / BLOCK);
}

/* When full, each new block replaces the oldest. */
static void cache(size_t asked)
{
	static size_t made;
	for (; made < asked; made++) {
		if (kept < CACHE_BLOCKS) {
			keep_until(kept + 1);
			continue;
		}
		free(blocks[made % CACHE_BLOCKS]);
		blocks[made % CACHE_BLOCKS] = touched(BLOCK);
	}
}

/* Tables of 1 MiB blocks, filled and flushed. */
static void table(double seconds, double mib)
{
	static char *blocks[64];
	static size_t filled;
	size_t wanted = (size_t)(seconds * mib);
	size_t flushed = wanted / 32 * 32;
	static size_t gone;
	for (; gone < flushed && gone < filled; gone++)
		free(blocks[gone % 64]);
	if (filled < flushed)
		filled = gone = flushed;
	for (; filled < wanted; filled++)
		blocks[filled % 64] = touched(MIB / 2);
}

static void map_until(size_t mib)
{
	static size_t mapped;
	for (; mapped < mib && mapped < 2048; mapped++) {
		char *at = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (at == MAP_FAILED)
			abort();
		memset(at, 1, MIB);
	}
}

static void *deep(void *unused)
{
	char frame[STACK_BYTES];
	(void)unused;
	memset(frame, 1, sizeof frame);
	__asm__ volatile("" : : "r"(frame) : "memory");
	pause();
	return NULL;
}

static void start_until(size_t count)
{
	static size_t started;
	for (; started < count && started < STACKS; started++) {
		pthread_t thread;
		pthread_attr_t attributes;
		pthread_attr_init(&attributes);
		pthread_attr_setstacksize(&attributes, STACK_BYTES + MIB);
		if (pthread_create(&thread, &attributes, deep, NULL))
			abort();
	}
}

/* One large block in huge pages; one page of each is written. */
static void bloat(void)
{
	const size_t huge = 2 * MIB, bytes = 128 * MIB;
	char *block = malloc(bytes);
	uintptr_t first = ((uintptr_t)block + huge - 1) & ~(huge - 1);
	if (!block || madvise((void *)first, bytes - huge, MADV_HUGEPAGE))
		abort();
	for (size_t at = first - (uintptr_t)block; at + huge <= bytes; at += huge)
		block[at] = 1;
}

static void step(const char *what, double seconds, double mib)
{
	const double period = 1.0;
	double share = seconds / period - (double)(long)(seconds / period);
	if (!strcmp(what, "leak") || !strcmp(what, "slow"))
		keep_until(BASE_BLOCKS + climbed(seconds, mib));
	else if (!strcmp(what, "lru"))
		cache(climbed(seconds, mib));
	else if (!strcmp(what, "sawtooth")) {
		size_t wanted = BASE_BLOCKS + climbed(share, mib);
		wanted < kept ? drop_until(wanted) : keep_until(wanted);
	} else if (!strcmp(what, "memtable"))
		table(seconds, mib);
	else if (!strcmp(what, "mappings"))
		map_until((size_t)(seconds * mib));
	else if (!strcmp(what, "stacks"))
		start_until((size_t)(seconds * mib * MIB / STACK_BYTES));
}

static void answer(const char *line)
{
	struct mallinfo2 own = mallinfo2();
	if (!strncmp(line, "trim", 4))
		malloc_trim(0);
	printf("%zu\n", own.uordblks + own.hblkhd);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "leak";
	double mib = argc > 2 ? atof(argv[2]) : 4, since;
	char line[64];
	struct pollfd input = {.fd = 0, .events = POLLIN};
	/* The sawtooth's blocks are in the heap, like small ones, not in mappings of their own. */
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	keep_until(strcmp(what, "lru") ? BASE_BLOCKS : 0);
	if (!strcmp(what, "bloat"))
		bloat();
	printf("ready\n");
	fflush(stdout);
	for (since = now();; step(what, now() - since, mib)) {
		ssize_t got;
		if (poll(&input, 1, 5) <= 0)
			continue;
		got = read(0, line, sizeof line - 1);
		if (got <= 0)
			return 0;
		line[got] = 0;
		answer(line);
	}
}
