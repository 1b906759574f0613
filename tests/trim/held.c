/*
 * Free memory pinned by blocks of two tables: on some pages only by those of the first, on others by both. It answers the command "drop": it
 * frees what the first table holds, and trims.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_BYTES = 400, PAGES = 6000, A_PAGE = 10 };
char **crimson, **azure;

static char *touched(void)
{
	char *block = malloc(BLOCK_BYTES);
	memset(block, 1, BLOCK_BYTES);
	return block;
}

int main(void)
{
	static char line[64], in[4096], out[4096];
	setvbuf(stdin, in, _IOFBF, sizeof in);
	setvbuf(stdout, out, _IOFBF, sizeof out);
	crimson = calloc(2 * PAGES, sizeof *crimson);
	azure = calloc(PAGES, sizeof *azure);
	char **others = malloc(2 * PAGES * A_PAGE * sizeof *others);
	size_t count = 0;
	for (int page = 0; page < 2 * PAGES; page++)
		for (int i = 0; i < A_PAGE; i++) {
			if (i == 0)
				crimson[page] = touched();
			else if (i == 1 && page >= PAGES)
				azure[page - PAGES] = touched();
			else
				others[count++] = touched();
		}
	while (count)
		free(others[--count]);
	free(others);
	malloc_trim(0);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		for (int page = 0; page < 2 * PAGES; page++) {
			free(crimson[page]);
			crimson[page] = NULL;
		}
		malloc_trim(0);
		printf("dropped\n");
		fflush(stdout);
	}
	return 0;
}
