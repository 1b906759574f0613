/* Drops blocks when it is asked to: their stacks are known to whoever listens by then. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

__attribute__((noinline)) static void *imported_record(int number)
{
	char *block = malloc(5000);
	memset(block, 'a' + number % 20, 5000);
	return block;
}

__attribute__((noinline)) static void forget_records(void)
{
	static void *volatile kept;
	for (int i = 0; i < 300; i++)
		kept = imported_record(i);
	kept = NULL;
}

__attribute__((noinline)) static void overwrite_the_stack(void)
{
	char volatile bytes[32768];
	for (size_t i = 0; i < sizeof bytes; i++)
		bytes[i] = 0;
}

int main(void)
{
	setvbuf(stdout, NULL, _IONBF, 0);
	puts("ready");
	getchar();
	forget_records();
	overwrite_the_stack();
	puts("dropped");
	for (;;)
		pause();
}
