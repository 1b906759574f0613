/* Threads that one after another fill an arena of their own and free most of it: each arena keeps its free memory. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 8
#define BLOCKS 6000

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t all;
static void *kept[THREADS][BLOCKS];

static void *work(void *argument)
{
	void **own = kept[(size_t)argument];
	int i;

	/* Each thread gets its arena at its first allocation, while the others are there. */
	own[0] = malloc(1000);
	pthread_barrier_wait(&all);
	pthread_mutex_lock(&turn);
	for (i = 1; i < BLOCKS; i++) {
		own[i] = malloc(1000);
		memset(own[i], 1, 1000);
	}
	for (i = 0; i < BLOCKS; i++)
		if (i % 50) {
			free(own[i]);
			own[i] = NULL;
		}
	pthread_mutex_unlock(&turn);
	pthread_barrier_wait(&all);
	usleep(1000000);
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	size_t i;

	pthread_barrier_init(&all, NULL, THREADS);
	for (i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			return 1;
	for (i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
