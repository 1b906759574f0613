/* Threads that allocate, fill, check and free without a pause, until the test ends it: any harm done to them is visible as a damaged
 * pattern in a block, a signal, or a hang. At the end every thread keeps one block, and the ledger is printed.
 *   churn THREADS */
#include "truth.h"
#include <pthread.h>

#define SLOTS 64

static int enough;
static long long rounds;

SITE struct block site_churned(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_kept(size_t n) { void *p = calloc(1, n); return TOOK(p, n); }

static void fill(struct block b, unsigned char with) { memset(b.ptr, with, b.size); }

static void check(struct block b, unsigned char with)
{
	for (size_t i = 0; i < b.size; i += 61)
		REQUIRE(((unsigned char *)b.ptr)[i] == with);
}

static void *work(void *arg)
{
	struct block slots[SLOTS] = { { 0 } };
	uint64_t random = 88172645463325252ULL + (uintptr_t)arg;

	while (!__atomic_load_n(&enough, __ATOMIC_ACQUIRE)) {
		random ^= random << 13;
		random ^= random >> 7;
		random ^= random << 17;
		unsigned at = random % SLOTS;
		if (slots[at].ptr) {
			check(slots[at], (unsigned char)at);
			block_free(slots[at]);
		}
		slots[at] = site_churned(1 + (random >> 8) % 2000);
		REQUIRE(slots[at].ptr);
		fill(slots[at], (unsigned char)at);
		__atomic_fetch_add(&rounds, 1, __ATOMIC_RELAXED);
	}
	for (unsigned at = 0; at < SLOTS; at++)
		block_free(slots[at]);
	site_kept(100 + (uintptr_t)arg);
	return NULL;
}

int main(int argc, char **argv)
{
	static pthread_t threads[64];
	int count = argc > 1 ? atoi(argv[1]) : 2;

	REQUIRE(count > 0 && count <= 64);
	truth_rendezvous("ready");
	for (int i = 0; i < count; i++)
		REQUIRE(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0);
	/* Reports its progress until the test ends it. */
	for (;;) {
		long long before = __atomic_load_n(&rounds, __ATOMIC_RELAXED);
		while (__atomic_load_n(&rounds, __ATOMIC_RELAXED) < before + 100)
			usleep(1000);
		truth_tell("alive", "");
		char byte = 0;
		REQUIRE(truth_fd < 0 || read(truth_fd, &byte, 1) == 1);
		if (truth_fd < 0 || byte == 'e')
			break;
	}
	__atomic_store_n(&enough, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	truth_rendezvous("done");
	return 0;
}
