/* Many simultaneous threads that allocate one after the other and all together.
 *   many_threads COUNT */
#include "truth.h"
#include <pthread.h>

static pthread_barrier_t together;

SITE struct block site_alone(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_together(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static void *work(void *arg)
{
	struct block kept = site_alone(16 + (uintptr_t)arg % 64);

	pthread_barrier_wait(&together);
	block_free(site_together(200));
	site_together(40);
	if ((uintptr_t)arg % 2)
		block_free(kept);
	return NULL;
}

int main(int argc, char **argv)
{
	size_t count = argc > 1 ? (size_t)atoi(argv[1]) : 1000;
	pthread_attr_t attr;
	pthread_t *threads = calloc(count, sizeof *threads);

	REQUIRE(threads && pthread_attr_init(&attr) == 0 && pthread_attr_setstacksize(&attr, 65536) == 0);
	REQUIRE(pthread_barrier_init(&together, NULL, (unsigned)count) == 0);
	truth_rendezvous("ready");
	for (size_t i = 0; i < count; i++)
		REQUIRE(pthread_create(&threads[i], &attr, work, (void *)(uintptr_t)i) == 0);
	for (size_t i = 0; i < count; i++)
		pthread_join(threads[i], NULL);
	truth_rendezvous("done");
	return 0;
}
