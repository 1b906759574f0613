/* Allocates a block where the test knows the Python stack; calls back from C, also in threads that Python does not know. */
#include <pthread.h>
#include <stdlib.h>

static void *last;

void truth_block(unsigned long size)
{
	free(__atomic_exchange_n(&last, malloc(size), __ATOMIC_SEQ_CST));
}

void call_back(void (*callback)(void))
{
	callback();
}

static void *run(void *callback)
{
	((void (*)(void))callback)();
	return NULL;
}

int call_back_in_thread(void (*callback)(void))
{
	pthread_t thread;

	return pthread_create(&thread, NULL, run, callback) || pthread_join(thread, NULL);
}
