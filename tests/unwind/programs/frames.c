/* Frames of a size known only at run time, and frames of half a megabyte. */
#include <alloca.h>
#include <stdlib.h>
#include <string.h>

static volatile long sink;

__attribute__((noinline, noclone)) static long with_alloca(int n, int depth);

__attribute__((noinline, noclone)) static long large(int n, int depth)
{
	volatile char room[512 * 1024 + 8];

	room[n & 1023] = n;
	return depth ? with_alloca(n, depth - 1) + room[n & 1023] : n;
}

__attribute__((noinline, noclone)) static long with_alloca(int n, int depth)
{
	size_t size = 16 + (size_t)(n * 37 % 3000);
	char *room = alloca(size);

	memset(room, n, size);
	if (depth == 0) {
		void *p = malloc(size);
		free(p);
		return room[size - 1];
	}
	return (depth & 3 ? with_alloca(n + 1, depth - 1) : large(n, depth - 1)) + room[0];
}

int main(void)
{
	for (int n = 0;; n++)
		sink += with_alloca(n, n % 20);
}
