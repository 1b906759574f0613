/* Allocates in rounds: on each line of its input 40,000 blocks of 1,000 bytes that are freed at once, and 2,000 that stay. Prints the
 * bytes requested so far and those that are live, by its own count. The heap has some MiB from the start. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SITE __attribute__((noinline, noclone)) static

static size_t allocated, live;

SITE char *site_passing(size_t size)
{
	char *block = malloc(size);

	allocated += size;
	memset(block, 1, size);
	return block;
}

SITE char *site_staying(size_t size)
{
	char *block = malloc(size);

	allocated += size;
	live += size;
	memset(block, 2, size);
	return block;
}

int main(void)
{
	char line[16];
	char *volatile kept[4096];

	for (int i = 0; i < 4096; i++) {
		kept[i] = malloc(4000);
		memset(kept[i], 3, 4000);
	}
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		for (int i = 0; i < 40000; i++) {
			free(site_passing(1000));
			if (i % 20 == 0)
				kept[i % 4096] = site_staying(1000);
		}
		printf("ledger %zu %zu\n", allocated, live);
		fflush(stdout);
	}
	return kept[0] == NULL;
}
