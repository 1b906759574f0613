/* Threads that allocate at very different rates, each with call sites of its own: a known heap by site, among short-lived blocks. The
 * argument seeds the sequences. On "g" it works and prints the live bytes by site. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A site: its name, the size of its blocks, the number of live ones, and the number of short-lived ones allocated for each. */
#define SITES(X)                                                                                                                           \
	X(rushed_small, 200, 20000, 60)                                                                                                    \
	X(rushed_large, 9000, 600, 2000)                                                                                                   \
	X(brisk_small, 120, 20000, 8)                                                                                                      \
	X(brisk_large, 30000, 120, 1500)                                                                                                   \
	X(calm_small, 64, 40000, 0)                                                                                                        \
	X(calm_large, 50000, 60, 0)

#define DEFINE(name, size, count, churn)                                                                                                   \
	__attribute__((noinline, noclone)) static void *site_##name(size_t bytes)                                                          \
	{                                                                                                                                  \
		void *volatile block = malloc(bytes);                                                                                      \
		return block;                                                                                                              \
	}
SITES(DEFINE)

struct site {
	const char *name;
	void *(*allocate)(size_t);
	size_t size, count, churn, live;
};

static struct site sites[] = {
#define LIST(name, size, count, churn) { "site_" #name, site_##name, size, count, churn, 0 },
	SITES(LIST)
};
#define COUNT (sizeof sites / sizeof sites[0])
#define THREADS (COUNT / 2)

static uint64_t seed;
static pthread_barrier_t start, end;

__attribute__((noinline, noclone)) static void momentary(size_t bytes)
{
	char *volatile block = malloc(bytes);

	memset(block, 1, bytes);
	free(block);
}

/* Two sites, alternating, so that the thread's rate applies to both. */
static void *work(void *argument)
{
	size_t thread = (size_t)argument;
	uint64_t state = 88172645463325252ull + 7919 * seed + 104729 * thread;

	pthread_barrier_wait(&start);
	for (size_t part = 0; part < 20; part++) {
		for (size_t i = 2 * thread; i < 2 * thread + 2; i++) {
			struct site *site = &sites[i];

			for (size_t n = 0; n < site->count / 20; n++) {
				state ^= state << 13;
				state ^= state >> 7;
				state ^= state << 17;
				size_t size = site->size * (3 + state % 3) / 4;

				site->live += size;
				site->allocate(size);
				for (size_t churn = 0; churn < site->churn; churn++)
					momentary(400 + (state >> 20) % 400);
			}
		}
		/* The calm one takes as long as the others: it pauses. */
		if (thread == THREADS - 1)
			usleep(5000);
	}
	pthread_barrier_wait(&end);
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	char command;

	seed = argc > 1 ? (uint64_t)atol(argv[1]) : 0;
	pthread_barrier_init(&start, NULL, THREADS);
	pthread_barrier_init(&end, NULL, THREADS + 1);
	puts("ready");
	fflush(stdout);
	if (read(0, &command, 1) != 1)
		return 1;
	for (size_t i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			return 2;
	pthread_barrier_wait(&end);
	printf("ledger");
	for (size_t i = 0; i < COUNT; i++)
		printf(" %s %zu", sites[i].name, sites[i].live);
	puts("");
	fflush(stdout);
	return read(0, &command, 1) == 1 ? 0 : 3;
}
