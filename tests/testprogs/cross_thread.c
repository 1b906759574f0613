/*
 * Blocks allocated by one thread and freed or resized by another, through a few shared slots, so that addresses are reused within
 * microseconds across threads. Arguments: threads, rounds per thread.
 */
#include "truth.h"
#include <pthread.h>

#define SLOTS 64
#define THREADS_MAX 16

/* A block contains its own entry in its first bytes, so a slot is one pointer and can be exchanged atomically. */
static struct block *slots[SLOTS];
static int rounds;
static pthread_barrier_t gate;

static struct block *carry(struct block b)
{
	*(struct block *)b.ptr = b;
	return (struct block *)b.ptr;
}

SITE struct block site_small(size_t n) { void *p = malloc(n); REQUIRE(p); return TOOK(p, n); }
SITE struct block site_medium(size_t n) { void *p = malloc(n); REQUIRE(p); return TOOK(p, n); }
SITE struct block site_zeroed(size_t n) { void *p = calloc(1, n); REQUIRE(p); return TOOK(p, n); }

SITE struct block site_resized(struct block old, size_t n)
{
	truth_strike(old);
	void *p = realloc(old.ptr, n);
	REQUIRE(p);
	return TOOK(p, n);
}

static void *work(void *arg)
{
	uint64_t seed = 88172645463325252ull * (2 * (uintptr_t)arg + 1);
	pthread_barrier_wait(&gate);
	for (int i = 0; i < rounds; i++) {
		seed ^= seed << 13;
		seed ^= seed >> 7;
		seed ^= seed << 17;
		size_t n = 24 + (seed >> 8) % 200;
		struct block *fresh = NULL, *old;
		switch (seed % 8) {
		case 0:
			fresh = carry(site_medium(1100 + n * 16));
			break;
		case 1:
			fresh = carry(site_zeroed(n));
			break;
		case 2: /* only frees */
			break;
		default:
			fresh = carry(site_small(n));
		}
		old = __atomic_exchange_n(&slots[(seed >> 32) % SLOTS], fresh, __ATOMIC_ACQ_REL);
		if (!old)
			continue;
		if (seed % 16 == 3) {
			old = carry(site_resized(*old, n + 500));
			old = __atomic_exchange_n(&slots[(seed >> 40) % SLOTS], old, __ATOMIC_ACQ_REL);
		}
		if (old)
			block_free(*old);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS_MAX];
	int count = argc > 1 ? atoi(argv[1]) : 4;
	rounds = argc > 2 ? atoi(argv[2]) : 20000;
	REQUIRE(count > 0 && count <= THREADS_MAX);
	pthread_barrier_init(&gate, NULL, (unsigned)count);
	truth_rendezvous("ready");
	for (uintptr_t i = 0; i < (uintptr_t)count; i++)
		REQUIRE(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	for (int i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	truth_rendezvous("done");
	return 0;
}
