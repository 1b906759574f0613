/* Notes between large temporary blocks: the notes pin the pages that the temporary blocks leave. With -DPATCHED no notes are made: the same
 * program with one statement left out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 20000

static void *blocks[BLOCKS], *notes[BLOCKS];

#ifndef PATCHED
__attribute__((noinline)) static void take_note(int i)
{
	notes[i] = malloc(48);
	memset(notes[i], 1, 48);
}
#endif

__attribute__((noinline)) static void load(int i, size_t size)
{
	blocks[i] = malloc(size);
	memset(blocks[i], 1, size);
}

int main(int argc, char **argv)
{
	int i;

	for (i = 0; i < BLOCKS; i++) {
		load(i, 2000 + i % 7 * 100);
#ifndef PATCHED
		take_note(i);
#endif
	}
	for (i = 0; i < BLOCKS; i++)
		free(blocks[i]);
	for (i = 0; i < BLOCKS / 10; i++)
		load(i, 900);
	/* With an argument, until its input ends; otherwise for a second. */
	if (argc > 1) {
		puts("done");
		fflush(stdout);
		while (read(0, argv[1], 1) > 0)
			;
	} else {
		usleep(1000000);
	}
	return notes[0] == blocks[0];
}
