/*
 * More threads than cores that allocate and free blocks with mappings of their own, and keep one in eight: a range that one thread
 * unmaps immediately becomes another thread's block, which must not be removed with the old one.
 */
#include "truth.h"
#include <pthread.h>

#define THREADS 8
#define ROUNDS 4000

SITE struct block site_mapped(size_t n) { void *p = malloc(n); REQUIRE(p); return TOOK(p, n); }

SITE struct block site_remapped(struct block old, size_t n)
{
	truth_strike(old);
	void *p = realloc(old.ptr, n);
	REQUIRE(p);
	return TOOK(p, n);
}

static void *work(void *arg)
{
	for (size_t i = 0; i < ROUNDS; i++) {
		struct block b = site_mapped(200000 + (size_t)arg);
		if (i % 16 == 5)
			b = site_remapped(b, 300000 + i);
		if (i % 8)
			block_free(b);
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	truth_rendezvous("ready");
	for (uintptr_t i = 0; i < THREADS; i++)
		REQUIRE(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	truth_rendezvous("done");
	return 0;
}
