/* Eight blocks in every millisecond of the clock, each freed in the next one, by functions whose first instruction no kernel emulates at a
 * probe, and which move the stack pointer before any other: the names are snmalloc's for Rust. Half of each millisecond is spent on other
 * work. Prints a line per second. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "compute.h"
#include "ticks.h"

#define ENTRY(name, calls) \
	__asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n.cfi_startproc\n" PROLOGUE "call " #calls "\n" EPILOGUE \
		".cfi_endproc\n.size " #name ", .-" #name "\n")
#define PROLOGUE "sub $8, %rsp\n.cfi_adjust_cfa_offset 8\n"
#define EPILOGUE "add $8, %rsp\n.cfi_adjust_cfa_offset -8\nret\n"

static char memory[2][8][64];
__attribute__((used)) static long used;

/* Never the same block twice in two milliseconds. */
__attribute__((used, noipa)) static void *take(void) { long next = used++; return memory[next / 8 % 2][next % 8]; }
__attribute__((used, noipa)) static void give(void *block) { *(volatile char *)block = 0; }

void *sn_rust_alloc(size_t alignment, size_t size);
void sn_rust_dealloc(void *block, size_t alignment, size_t size);
ENTRY(sn_rust_alloc, take);
ENTRY(sn_rust_dealloc, give);

__attribute__((noipa)) void *site_eight(void) { return sn_rust_alloc(16, 64); }

int main(void)
{
	void *blocks[8] = {0};
	struct timespec next;

	clock_gettime(CLOCK_MONOTONIC, &next);
	for (long tick = 0;; tick++) {
		for (int i = 0; i < 8; i++) {
			if (blocks[i])
				sn_rust_dealloc(blocks[i], 16, 64);
			blocks[i] = site_eight();
		}
		compute(500);
		end_tick(tick, &next);
	}
}
