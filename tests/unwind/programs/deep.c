/* Calls malloc from a given depth repeatedly. Frames of different sizes, no frame pointers. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *volatile keep;

__attribute__((noinline)) static void leaf(int n)
{
	void *p = malloc(64 + (n & 15));
	keep = p;
	free(p);
}

__attribute__((noinline, noclone)) static int down(int depth, int n)
{
	volatile char room[24 + 8];

	memset((char *)room, depth, sizeof(room));
	if (depth == 0)
		leaf(n);
	else
		down(depth - 1, n);
	return room[0];
}

int main(int argc, char **argv)
{
	int depth = argc > 1 ? atoi(argv[1]) : 20, pause_us = argc > 2 ? atoi(argv[2]) : 1000, n = 0;

	for (;;) {
		down(depth, n++);
		if (pause_us)
			usleep(pause_us);
	}
}
