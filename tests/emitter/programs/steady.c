/* A heap in a steady state with churn: sites with from 2 to 30 percent of some 24 MiB, in blocks from 24 bytes to a megabyte, each of which
 * is live for a while and is replaced by the next. The argument seeds the sequence. On "g" it works and prints the live bytes by site. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define SITES(X) X(tiny, 24, 2) X(small, 100, 5) X(medium, 700, 10) X(page, 4096, 15) X(big, 40000, 20) X(huge, 300000, 18) X(vast, 1200000, 30)

#define DEFINE(name, size, percent)                                                                                                        \
	__attribute__((noinline, noclone)) static void *site_##name(size_t bytes)                                                          \
	{                                                                                                                                  \
		void *volatile block = malloc(bytes);                                                                                      \
		return block;                                                                                                              \
	}
SITES(DEFINE)

struct site {
	const char *name;
	void *(*allocate)(size_t);
	size_t size, percent, capacity, live;
	void **blocks;
	size_t *sizes;
};

static struct site sites[] = {
#define LIST(name, size, percent) { "site_" #name, site_##name, size, percent, 0, 0, NULL, NULL },
	SITES(LIST)
};
#define COUNT (sizeof sites / sizeof sites[0])

static uint64_t state;

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state;
}

int main(int argc, char **argv)
{
	const size_t heap = 24u << 20;
	char command;

	state = 88172645463325252ull + 7919 * (argc > 1 ? (uint64_t)atol(argv[1]) : 0);
	puts("ready");
	fflush(stdout);
	while (read(0, &command, 1) == 1) {
		for (size_t i = 0; i < COUNT; i++) {
			struct site *site = &sites[i];

			site->capacity = heap / 100 * site->percent / site->size + 1;
			site->blocks = calloc(site->capacity, sizeof(void *));
			site->sizes = calloc(site->capacity, sizeof(size_t));
			/* Each slot is used three times. */
			for (size_t n = 0; n < 3 * site->capacity; n++) {
				size_t at = n < site->capacity ? n : next_random() % site->capacity;
				size_t size = site->size * (3 + next_random() % 3) / 4;

				free(site->blocks[at]);
				site->live += size - site->sizes[at];
				site->blocks[at] = site->allocate(size);
				site->sizes[at] = size;
			}
		}
		printf("ledger");
		for (size_t i = 0; i < COUNT; i++)
			printf(" %s %zu", sites[i].name, sites[i].live);
		puts("");
		fflush(stdout);
	}
	return 0;
}
