/* Frames aligned to 64 bytes: the compiler saves the caller's stack pointer in the frame. */
#include <stdlib.h>
#include <string.h>

static volatile long sink;

struct line {
	_Alignas(64) double values[32];
};

__attribute__((noinline, noclone)) static double aligned(int depth, const struct line *outer)
{
	volatile struct line line;

	for (int i = 0; i < 32; i++)
		line.values[i] = outer->values[i] * depth + i;
	if (depth == 0) {
		free(malloc(64));
		return line.values[7];
	}
	return aligned(depth - 1, (const struct line *)&line) + line.values[3];
}

int main(void)
{
	struct line line = {};

	for (int n = 0;; n++)
		sink += (long)aligned(n % 20, &line);
}
