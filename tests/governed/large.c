/* `large CHURN [empty]`: CHURN threads make pairs of small blocks as fast as they can. Two threads allocate, resize and free large and
 * small blocks at known sites on command, each also blocks that the other allocated. The program itself counts blocks by site, with their
 * malloc_usable_size. It starts with some blocks, unless `empty` is given. Commands on standard input:
 *
 *   work COUNT    makes this many operations; then prints `done`
 *   flood MS      makes large pairs as fast as one thread can, for this long; then `done`
 *   forget        removes the blocks that are live now from the count; then `done`
 *   truth         `site BLOCKS BYTES` of each site, from 1033 usable bytes on; `small PAIRS` so far; then `done`
 *   fork          a child allocates, frees and ends; then `done`
 *   exec          runs itself again, empty
 */
#define _GNU_SOURCE
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 3000
#define LARGE 1033 /* more usable bytes than any chunk of the thread cache has */

enum site { MALLOC, CALLOC, GROW, SHRINK, MOVE, FROM_NULL, POSIX, ALIGNED, PAGES, MAPPED, SMALL, SITES };

static const char *const names[SITES] = {
	"site_malloc", "site_calloc",    "site_grow",  "site_shrink", "site_move",  "site_from_null",
	"site_posix",  "site_aligned", "site_pages", "site_mapped", "site_small",
};

static struct {
	void *block;
	enum site site;
	int old;
} slots[SLOTS];
static struct {
	long blocks, bytes;
} truth[SITES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_long left, pairs;
static atomic_int at_work;

/* Not a tail call, so that the site stays on the stack. */
#define SITE(name, call)                                     \
	__attribute__((noipa)) static void *name(void *p, size_t n) \
	{                                                    \
		void *block = call;                          \
		__asm__ volatile("" : "+r"(block) : "r"(p)); \
		return block;                                \
	}

static void *posix(size_t align, size_t n)
{
	void *block = NULL;

	return posix_memalign(&block, align, n) ? NULL : block;
}

SITE(site_malloc, malloc(n))
SITE(site_calloc, calloc(n / 8, 8))
SITE(site_grow, realloc(p, n))
SITE(site_shrink, realloc(p, n))
SITE(site_move, realloc(p, n))
SITE(site_from_null, realloc(NULL, n))
SITE(site_posix, posix(64, n))
SITE(site_aligned, aligned_alloc(256, n & ~255UL))
SITE(site_pages, valloc(n))
SITE(site_mapped, malloc(n))
SITE(site_small, malloc(n))

static unsigned random_of(unsigned *seed, unsigned below)
{
	*seed = *seed * 1664525 + 1013904223;
	return (*seed >> 8) % below;
}

static size_t large_size(unsigned *seed)
{
	/* Close to the limit, or far above it. */
	return random_of(seed, 4) ? 1033 + random_of(seed, 30000) : 1000 + random_of(seed, 80);
}

static void count(int slot, int sign)
{
	size_t usable = malloc_usable_size(slots[slot].block);

	if (slots[slot].old || usable < LARGE)
		return;
	truth[slots[slot].site].blocks += sign;
	truth[slots[slot].site].bytes += sign * (long)usable;
}

static void fresh(int slot, unsigned *seed)
{
	void *(*const makers[])(void *, size_t) = { site_malloc, site_calloc,  site_from_null, site_posix,
		                                    site_aligned, site_pages, site_mapped,    site_small };
	const enum site sites[] = { MALLOC, CALLOC, FROM_NULL, POSIX, ALIGNED, PAGES, MAPPED, SMALL };
	unsigned which = random_of(seed, 8);
	size_t size = large_size(seed);

	if (sites[which] == MAPPED)
		size = (random_of(seed, 16) ? 3 : 300) * 1000 + random_of(seed, 50000);
	if (sites[which] == SMALL)
		size = 16 + random_of(seed, 900);
	slots[slot].block = makers[which](NULL, size);
	slots[slot].site = sites[which];
	slots[slot].old = 0;
	count(slot, 1);
}

static void resized(int slot, unsigned *seed)
{
	void *(*const makers[])(void *, size_t) = { site_grow, site_shrink, site_move };
	const enum site sites[] = { GROW, SHRINK, MOVE };
	unsigned which = random_of(seed, 3);
	size_t size = which == 0 ? 1033 + random_of(seed, 40000) : which == 1 ? 16 + random_of(seed, 1000) : 200000 + random_of(seed, 200000);

	count(slot, -1);
	slots[slot].block = makers[which](slots[slot].block, size);
	slots[slot].site = sites[which];
	slots[slot].old = 0;
	count(slot, 1);
}

static void *worker(void *number)
{
	unsigned seed = 12345 + (unsigned)(long)number;

	for (;;) {
		if (atomic_load(&left) <= 0) {
			usleep(1000);
			continue;
		}
		atomic_fetch_add(&at_work, 1);
		while (atomic_fetch_sub(&left, 1) > 0) {
			int slot = random_of(&seed, SLOTS);

			pthread_mutex_lock(&lock);
			if (!slots[slot].block) {
				fresh(slot, &seed);
			} else if (random_of(&seed, 3)) {
				count(slot, -1);
				free(slots[slot].block);
				slots[slot].block = NULL;
			} else {
				resized(slot, &seed);
			}
			pthread_mutex_unlock(&lock);
			if (!random_of(&seed, 10))
				usleep(100);
		}
		atomic_fetch_sub(&at_work, 1);
	}
	return NULL;
}

static void *churn(void *unused)
{
	for (;;) {
		for (int i = 0; i < 1000; i++) {
			void *volatile block = malloc(64 + i % 64);

			free(block);
		}
		atomic_fetch_add(&pairs, 1000);
	}
	return unused;
}

static long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

__attribute__((noipa)) static void flood(long ms)
{
	for (long end = now_ms() + ms; now_ms() < end;)
		for (int i = 0; i < 100; i++)
			free(site_malloc(NULL, 2000 + i));
}

static void fork_child(void)
{
	int status;
	pid_t child = fork();

	if (!child) {
		for (int i = 0; i < 1000; i++)
			free(site_malloc(NULL, 5000 + i));
		_exit(0);
	}
	if (child < 0 || waitpid(child, &status, 0) != child || status)
		abort();
}

int main(int argc, char **argv)
{
	char line[64], order[16];
	unsigned seed = 1;
	long number;
	pthread_t thread;

	for (int slot = 0; argc < 3 && slot < SLOTS / 2; slot++)
		fresh(slot, &seed);
	for (long i = 0; i < 2; i++)
		pthread_create(&thread, NULL, worker, (void *)i);
	for (int i = 0; argc > 1 && i < atoi(argv[1]); i++)
		pthread_create(&thread, NULL, churn, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fgets(line, sizeof(line), stdin)) {
		number = 0;
		if (sscanf(line, "%15s %ld", order, &number) < 1)
			continue;
		if (!strcmp(order, "exec"))
			execl("/proc/self/exe", argv[0], argv[1], "empty", NULL);
		if (!strcmp(order, "work")) {
			atomic_store(&left, number);
			while (atomic_load(&left) > 0 || atomic_load(&at_work))
				usleep(1000);
		}
		if (!strcmp(order, "flood"))
			flood(number);
		if (!strcmp(order, "fork"))
			fork_child();
		pthread_mutex_lock(&lock);
		if (!strcmp(order, "forget")) {
			for (int slot = 0; slot < SLOTS; slot++)
				slots[slot].old = 1;
			memset(truth, 0, sizeof(truth));
		}
		if (!strcmp(order, "truth")) {
			for (int site = 0; site < SITES; site++)
				printf("%s %ld %ld\n", names[site], truth[site].blocks, truth[site].bytes);
			printf("small %ld\n", atomic_load(&pairs));
		}
		pthread_mutex_unlock(&lock);
		puts("done");
	}
	return 0;
}
