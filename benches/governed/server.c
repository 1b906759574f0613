/* Two threads as in a server: each handles requests of 20 to 60 blocks of mixed sizes with some work on each, passes half of them to the
 * other thread to free, and keeps a few in a table for a long time. The argument is the number of requests per thread, in thousands. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define RING 4096
#define TABLE 20000

static _Atomic(void *) rings[2][RING];
static long thousands;

static unsigned long next(unsigned long *x)
{
	return *x = *x * 6364136223846793005UL + 1442695040888963407UL;
}

static void *serve(void *which)
{
	long self = (long)which;
	unsigned long x = 88172645463325252UL + self;
	static void *tables[2][TABLE];
	unsigned long at = 0;

	for (long request = 0; request < thousands * 1000; request++) {
		void *blocks[64];
		int count = 20 + (next(&x) >> 60) * 40 / 15;

		for (int i = 0; i < count; i++) {
			unsigned long r = next(&x) >> 33;
			size_t size = r % 16 ? 16 + r % 240 : 256 + r % 8000;

			blocks[i] = malloc(size);
			memset(blocks[i], (int)r, size);
		}
		for (int i = 0; i < count; i++) {
			void *old = blocks[i];

			if (i % 2)
				old = atomic_exchange(&rings[!self][at++ % RING], old);
			else if (i % 16 == 0) {
				void **place = &tables[self][(next(&x) >> 33) % TABLE];

				old = *place;
				*place = blocks[i];
			}
			free(old);
		}
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[2];

	thousands = argc > 1 ? atol(argv[1]) : 10;
	for (long i = 0; i < 2; i++)
		if (pthread_create(&threads[i], NULL, serve, (void *)i))
			return 1;
	for (int i = 0; i < 2; i++)
		pthread_join(threads[i], NULL);
	return 0;
}
