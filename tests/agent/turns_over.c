/*
 * A cache of 32 MiB whose entries are replaced all the time, the oldest first: after some seconds none is left from before. Ends with its input.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ENTRIES = 16384, ENTRY_BYTES = 2048 };
static char *entries[ENTRIES];

static char *make_entry(int i)
{
	char *entry = malloc(ENTRY_BYTES);

	if (!entry)
		abort();
	memset(entry, i, ENTRY_BYTES);
	return entry;
}

int main(void)
{
	struct pollfd input = { .fd = 0, .events = POLLIN };

	for (int i = 0; i < ENTRIES; i++)
		entries[i] = make_entry(i);
	puts("ready");
	fflush(stdout);
	/* 64 entries a millisecond or so: once around in a second. */
	for (unsigned i = 0; poll(&input, 1, 1) == 0;) {
		for (int n = 0; n < 64; n++, i++) {
			free(entries[i % ENTRIES]);
			entries[i % ENTRIES] = make_entry((int)i);
		}
	}
	return 0;
}
