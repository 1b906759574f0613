/* Loses a hundred blocks at the start, and one more every millisecond. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static __attribute__((noinline)) void lose(void)
{
	char *block = malloc(300);
	memset(block, 'x', 300);
	/* The compiler must not optimize the block away. */
	__asm__ volatile("" : : "r"(block) : "memory");
}

/* Clears pointers to the last block from the stack. */
static __attribute__((noinline)) void wipe(void)
{
	volatile char stack[4096];
	for (size_t i = 0; i < sizeof stack; i++)
		stack[i] = 0;
}

int main(void)
{
	for (int i = 0; i < 100; i++)
		lose();
	wipe();
	puts("ready");
	fflush(stdout);
	for (;;) {
		lose();
		wipe();
		usleep(1000);
	}
}
