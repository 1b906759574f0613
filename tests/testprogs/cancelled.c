/* Threads cancelled during an allocation-heavy loop; their cleanup frees their blocks, and the next thread continues. */
#include "truth.h"
#include <pthread.h>

SITE struct block site_loop(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_held(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_after(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static int spinning;

static void release(void *arg)
{
	block_free(*(struct block *)arg);
}

static void *work(void *arg)
{
	struct block held = site_held(500 + (size_t)arg);
	pthread_cleanup_push(release, &held);
	for (size_t i = 0;; i++) {
		struct block b = site_loop(16 + i % 1200);
		if (i == 1000)
			__atomic_store_n(&spinning, 1, __ATOMIC_RELEASE);
		/* One in a hundred of the first survives; cancellation can only happen between two allocations. */
		if (i % 100 || i >= 1000)
			block_free(b);
		pthread_testcancel();
	}
	pthread_cleanup_pop(0);
	return NULL;
}

int main(void)
{
	truth_rendezvous("ready");
	for (uintptr_t i = 0; i < 20; i++) {
		pthread_t thread;
		void *result;
		__atomic_store_n(&spinning, 0, __ATOMIC_RELEASE);
		REQUIRE(pthread_create(&thread, NULL, work, (void *)i) == 0);
		while (!__atomic_load_n(&spinning, __ATOMIC_ACQUIRE))
			usleep(100);
		pthread_cancel(thread);
		pthread_join(thread, &result);
		REQUIRE(result == PTHREAD_CANCELED);
		site_after(900 + i);
	}
	truth_rendezvous("done");
	return 0;
}
