/* A process with freed memory, on a C library without malloc_trim. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(void)
{
	char *blocks[2000];
	for (int i = 0; i < 2000; i++) {
		blocks[i] = malloc(9000);
		memset(blocks[i], 1, 9000);
	}
	for (int i = 0; i < 2000; i++)
		if (i % 8)
			free(blocks[i]);
	char c;
	return write(1, "ready\n", 6) != 6 || read(0, &c, 1) > 0;
}
