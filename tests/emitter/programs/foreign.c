/* A foreign emitter: sys/sdt.h as documented, nothing of fragprof's. Its "sampling" is decided by the program, so the live bytes by
 * site are known: each site weights its blocks by a factor of its own. PROVIDER is otel_memory or ddheap.
 *
 * Commands, one character each on standard input: g = allocate and free; s = print the semaphores; any other, or the end: end. Answers, one
 * line each: "ledger SITE LIVE_WEIGHT ALLOCATED_WEIGHT ..." and "semaphores ALLOC FREE". */
#define _SDT_HAS_SEMAPHORES 1
#include <sys/sdt.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GLUE(a, b) a##b
#define NAMED(a, b) GLUE(a, b)
#define ALLOC_SEMAPHORE NAMED(PROVIDER, _alloc_semaphore)
#define FREE_SEMAPHORE NAMED(PROVIDER, _free_semaphore)
#define SECTION __attribute__((section(".probes"), used))
volatile unsigned short ALLOC_SEMAPHORE SECTION = 0;
volatile unsigned short FREE_SEMAPHORE SECTION = 0;

#define SITE __attribute__((noinline, noclone)) static

/* The macros paste their arguments, so the provider's name has to be expanded before. */
#define ALLOC_(provider, pointer, size, weight) STAP_PROBE3(provider, alloc, pointer, size, weight)
#define ALLOC(pointer, size, weight) ALLOC_(PROVIDER, pointer, size, weight)
#define FREE_(provider, pointer) STAP_PROBE1(provider, free, pointer)
#define FREE(pointer) FREE_(PROVIDER, pointer)

struct told {
	short pad;
	unsigned char small;
	void *pointer;
	unsigned int size;
	long weight[4];
};

/* Arguments wherever the compiler has them: registers. */
SITE void *site_registers(size_t size)
{
	void *pointer = malloc(size);

	if (ALLOC_SEMAPHORE)
		ALLOC(pointer, size, size * 1000);
	return pointer;
}

/* Constants. */
SITE void *site_constants(void)
{
	void *pointer = malloc(96);

	if (ALLOC_SEMAPHORE)
		ALLOC(pointer, 96, 524288);
	return pointer;
}

/* Memory, of several widths, one with an index. */
SITE void *site_memory(volatile struct told *told, int index)
{
	void *pointer = malloc(200);

	told->pointer = pointer;
	told->size = 200;
	told->small = 200;
	told->weight[index] = 65536;
	if (ALLOC_SEMAPHORE) {
		if (index & 1)
			ALLOC(told->pointer, told->size, told->weight[index]);
		else
			ALLOC(told->pointer, told->small, told->weight[index]);
	}
	return pointer;
}

SITE void give_back(void *pointer)
{
	if (FREE_SEMAPHORE)
		FREE(pointer);
	free(pointer);
}

#define BLOCKS 100

static void allocate(void)
{
	static void *registers[BLOCKS], *constants[BLOCKS], *memory[BLOCKS];
	static struct told told;

	for (int i = 0; i < BLOCKS; i++) {
		registers[i] = site_registers(100 + i);
		constants[i] = site_constants();
		memory[i] = site_memory(&told, i & 3);
	}
	/* The first block of each site stays live. */
	for (int i = 10; i < BLOCKS; i++)
		give_back(registers[i]);
	for (int i = 20; i < BLOCKS; i++)
		give_back(constants[i]);
	for (int i = 30; i < BLOCKS; i++)
		give_back(memory[i]);
	long live = 0, all = 0;
	for (int i = 0; i < BLOCKS; i++) {
		all += (100 + i) * 1000;
		live += i < 10 ? (100 + i) * 1000 : 0;
	}
	printf("ledger site_registers %ld %ld site_constants %d %d site_memory %d %d\n", live, all, 20 * 524288, BLOCKS * 524288, 30 * 65536,
	       BLOCKS * 65536);
	fflush(stdout);
}

int main(void)
{
	char command;

	while (read(0, &command, 1) == 1) {
		if (command == 'g')
			allocate();
		else if (command == 's') {
			printf("semaphores %d %d\n", ALLOC_SEMAPHORE, FREE_SEMAPHORE);
			fflush(stdout);
		} else
			break;
	}
	return 0;
}
