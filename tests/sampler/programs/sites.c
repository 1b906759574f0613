/* A heap with known live bytes by site under churn. Each site allocates sizes of its own, so that a consumer without stacks can distinguish
 * them: site i those in [64 << i, 64 << i + 32). Arguments: threads, pairs per thread, live KiB per site. At the end it writes the live
 * bytes by site to standard output and waits for its input to end. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define SITES 8

static long pairs;
static size_t live_bytes_max;
static size_t live_bytes[SITES];

static uint64_t next_random(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* Each thread keeps its share of every site's live blocks in a ring: the newest replaces the oldest. */
struct ring {
	void **blocks;
	size_t *sizes;
	size_t capacity, at, bytes;
};

static void *work(void *argument)
{
	uint64_t random = 88172645463325252ull + 7919 * (uintptr_t)argument;
	struct ring rings[SITES] = { 0 };

	for (int site = 0; site < SITES; site++) {
		rings[site].capacity = live_bytes_max / (64u << site) + 1;
		rings[site].blocks = calloc(rings[site].capacity, sizeof(void *));
		rings[site].sizes = calloc(rings[site].capacity, sizeof(size_t));
	}
	for (long i = 0; i < pairs; i++) {
		uint64_t r = next_random(&random);
		int site = (int)(r % SITES);
		size_t size = (64u << site) + (r >> 8) % 32;
		struct ring *ring = &rings[site];

		/* Three of four are freed at once: churn. */
		void *short_lived[3];
		for (int j = 0; j < 3; j++)
			short_lived[j] = malloc(size);
		free(ring->blocks[ring->at]);
		ring->bytes -= ring->sizes[ring->at];
		ring->blocks[ring->at] = malloc(size);
		ring->sizes[ring->at] = size;
		ring->bytes += size;
		ring->at = (ring->at + 1) % ring->capacity;
		for (int j = 0; j < 3; j++)
			free(short_lived[j]);
	}
	for (int site = 0; site < SITES; site++)
		__atomic_fetch_add(&live_bytes[site], rings[site].bytes, __ATOMIC_RELAXED);
	/* The blocks stay: those that are live at the end are the ground truth. */
	return NULL;
}

int main(int argc, char **argv)
{
	long threads = argc > 1 ? atol(argv[1]) : 1;
	pthread_t ids[64];
	char byte;

	pairs = argc > 2 ? atol(argv[2]) : 100000;
	live_bytes_max = (size_t)(argc > 3 ? atol(argv[3]) : 1024) * 1024;
	if (read(0, &byte, 1) != 1)
		return 1;
	for (long i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, work, (void *)i))
			return 1;
	for (long i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	for (int site = 0; site < SITES; site++)
		dprintf(1, "%zu ", live_bytes[site]);
	dprintf(1, "\n");
	return read(0, &byte, 1) < 0;
}
