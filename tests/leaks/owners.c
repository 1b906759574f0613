/* Blocks with known owners: owners FILE. Writes to FILE the addresses of a catalogue's storage, of a block shared by two, and of a leaf. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct catalogue {
	char name[16];
	void **bestsellers;
};
struct catalogue the_catalogue;
void **the_left, **the_right;

/* Between two entries there is a block that is freed at the end and leaves a hole. */
static void **table(int entries, int bytes)
{
	void **table = calloc(entries, sizeof *table), **holes = calloc(entries, sizeof *holes);
	for (int i = 0; i < entries; i++) {
		table[i] = malloc(bytes);
		memset(table[i], 1, bytes);
		holes[i] = malloc(3 * bytes);
		memset(holes[i], 2, 3 * bytes);
	}
	for (int i = 0; i < entries; i++)
		free(holes[i]);
	free(holes);
	return table;
}

static __attribute__((noinline)) void build(const char *name)
{
	the_catalogue.bestsellers = table(8193, 100);
	the_left = table(10, 40);
	the_right = table(20, 40);
	void **shared = table(500, 40);
	the_left[0] = the_right[3] = shared;
	FILE *file = fopen(name, "w");
	fprintf(file, "%p %p %p\n", (void *)the_catalogue.bestsellers, (void *)shared, the_catalogue.bestsellers[77]);
	fclose(file);
}

/* Clears pointers to the structures from the stack. */
static __attribute__((noinline)) void wipe(void)
{
	volatile char stack[65536];
	for (size_t i = 0; i < sizeof stack; i++)
		stack[i] = 0;
}

int main(int argc, char **argv)
{
	build(argc > 1 ? argv[1] : "/dev/null");
	wipe();
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
