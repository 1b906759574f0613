/* The tight loop: so many million pairs of malloc and free of 64 to 127 bytes. */
#include <stdlib.h>

int main(int argc, char **argv)
{
	long millions = argc > 1 ? atol(argv[1]) : 1;

	for (long n = 0; n < millions * 1000000; n++) {
		void *block = malloc(64 + n % 64);
		__asm__ volatile("" : : "r"(block) : "memory");
		free(block);
	}
	return 0;
}
