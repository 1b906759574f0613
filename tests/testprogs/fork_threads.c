/*
 * Forks while threads allocate. A child's heap is a copy: allocations and frees of the children do not affect the parent, and only the
 * parent's ledger is printed.
 */
#include "truth.h"
#include <pthread.h>
#include <sys/wait.h>

#define THREADS 3
#define CHILDREN 8
#define INHERITED 200

static int stop;

SITE struct block site_inherited(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_thread(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block child_allocates(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static void *work(void *arg)
{
	size_t n = 32 + (size_t)arg;
	for (unsigned i = 0; i < 2000 || !__atomic_load_n(&stop, __ATOMIC_ACQUIRE); i++) {
		struct block a = site_thread(n + i % 300), b = site_thread(1500 + i % 700);
		if (i % 500)
			block_free(a);
		block_free(b);
		/* Enough for a fork to happen while a thread is in the allocator; bounded for the recording. */
		if (i > 200000)
			break;
	}
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	struct block inherited[INHERITED];
	truth_rendezvous("ready");
	for (size_t i = 0; i < INHERITED; i++)
		inherited[i] = site_inherited(100 + i);
	for (uintptr_t i = 0; i < THREADS; i++)
		REQUIRE(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
	for (int c = 0; c < CHILDREN; c++) {
		int status;
		pid_t child = fork();
		REQUIRE(child >= 0);
		if (child == 0) {
			truth_disown();
			alarm(60);
			for (size_t i = 0; i < INHERITED; i++)
				block_free(inherited[i]);
			for (size_t i = 0; i < 1000; i++)
				child_allocates(64 + i);
			_exit(0);
		}
		REQUIRE(waitpid(child, &status, 0) == child);
		errno = status;
		REQUIRE(status == 0);
		/* Frees and allocations of the parent in between, at addresses that the child used too. */
		block_free(inherited[c]);
		inherited[c] = site_inherited(777);
	}
	__atomic_store_n(&stop, 1, __ATOMIC_RELEASE);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	truth_rendezvous("done");
	return 0;
}
