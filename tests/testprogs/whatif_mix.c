/* Threads that allocate in the same way in each run: small and large blocks, realloc, alignments, huge blocks, threads that come and go.
 * Each thread has its own random numbers, and they take turns at each phase. */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define THREADS 6
#define SLOTS 6000
#define STEPS 60000

static pthread_barrier_t phase;

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void *work(void *argument)
{
	uint64_t state = 88172645463325252ULL + (uintptr_t)argument * 7919;
	static void *slots[THREADS + 1][SLOTS];
	void **own = slots[(uintptr_t)argument % (THREADS + 1)];
	int i;

	for (i = 0; i < STEPS; i++) {
		void **slot = &own[next(&state) % SLOTS];
		size_t size = 16 + next(&state) % (next(&state) % 64 ? 400 : 20000);

		switch (next(&state) % 8) {
		case 0:
			*slot = realloc(*slot, size);
			break;
		case 1:
			free(*slot);
			if (posix_memalign(slot, 64 << next(&state) % 4, size))
				abort();
			break;
		case 2:
			free(*slot);
			*slot = calloc(1, size);
			break;
		default:
			free(*slot);
			*slot = malloc(size);
		}
		memset(*slot, 1, size);
	}
	pthread_barrier_wait(&phase);
	for (i = 0; i < SLOTS; i++)
		if (next(&state) % 10) {
			free(own[i]);
			own[i] = NULL;
		}
	pthread_barrier_wait(&phase);
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	void *huge[8];
	uintptr_t round, i;

	for (round = 0; round < 2; round++) {
		pthread_barrier_init(&phase, NULL, THREADS);
		for (i = 0; i < THREADS; i++)
			if (pthread_create(&threads[i], NULL, work, (void *)(i + round)))
				return 1;
		for (i = 0; i < THREADS; i++)
			pthread_join(threads[i], NULL);
	}
	for (i = 0; i < 8; i++) {
		huge[i] = malloc((i + 1) << 20);
		memset(huge[i], 1, (i + 1) << 20);
	}
	for (i = 0; i < 8; i += 2)
		free(huge[i]);
	usleep(1500000);
	return 0;
}
