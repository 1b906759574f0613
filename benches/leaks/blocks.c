/* A heap of linked blocks: blocks COUNT BYTES. Each has two pointers to others; one of a thousand is dropped. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void **table;

int main(int argc, char **argv)
{
	size_t count = argc > 1 ? strtoul(argv[1], NULL, 0) : 1000000, bytes = argc > 2 ? strtoul(argv[2], NULL, 0) : 240;
	uint64_t random = 88172645463325252ull;
	table = calloc(count, sizeof *table);
	for (size_t i = 0; i < count; i++) {
		table[i] = malloc(bytes);
		memset(table[i], 1, bytes);
	}
	for (size_t i = 0; i < count; i++) {
		void **block = table[i];
		for (int word = 0; word < 2; word++) {
			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			/* Not to those that are dropped below. */
			size_t to = random % count;
			block[word] = to % 1000 ? table[to] : NULL;
		}
	}
	for (size_t i = 0; i < count; i += 1000)
		table[i] = NULL;
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
