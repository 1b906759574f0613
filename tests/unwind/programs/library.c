/* A library whose section headers are removed after linking. */
#include <stdlib.h>

__attribute__((noinline, noclone)) long library_down(int depth)
{
	volatile long room[3] = { depth, depth + 1, depth + 2 };

	if (depth == 0) {
		void *p = malloc(100);
		long result = (long)p;
		free(p);
		return result;
	}
	return library_down(depth - 1) + room[1];
}
