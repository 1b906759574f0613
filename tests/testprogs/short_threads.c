/* Many short threads: thread caches are created and destroyed, and thread-specific destructors free after the thread's function returns. */
#include "truth.h"
#include <pthread.h>

static pthread_key_t key;

SITE struct block site_thread(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_specific(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static void destroy(void *arg)
{
	struct block b = *(struct block *)arg;
	block_free(b);
}

static void *work(void *arg)
{
	struct block specific = site_specific(64);
	*(struct block *)specific.ptr = specific;
	pthread_setspecific(key, specific.ptr);
	for (size_t i = 0; i < 50; i++) {
		struct block b = site_thread(20 + (size_t)arg + i);
		if (i)
			block_free(b);
	}
	return NULL;
}

int main(void)
{
	REQUIRE(pthread_key_create(&key, destroy) == 0);
	truth_rendezvous("ready");
	for (uintptr_t i = 0; i < 100; i++) {
		pthread_t pair[2];
		for (int k = 0; k < 2; k++)
			REQUIRE(pthread_create(&pair[k], NULL, work, (void *)i) == 0);
		for (int k = 0; k < 2; k++)
			pthread_join(pair[k], NULL);
	}
	truth_rendezvous("done");
	return 0;
}
