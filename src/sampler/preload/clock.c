/* The time and the CPU. See clock.h. */
#include "clock.h"

#include <elf.h>

#include "next.h"

/* <linux/time.h>. */
#define CLOCK_MONOTONIC_COARSE 6

/* struct timespec of a 64-bit process. */
struct time {
	int64_t seconds;
	int64_t nanoseconds;
};

static int (*gettime)(int clock, struct time *time);
static long (*getcpu)(unsigned *processor, unsigned *node, void *unused);

/* The kernel's own object: one segment that is loaded from its start, no relocations (vdso(7)). */
void clock_resolve(uintptr_t vdso)
{
	const Elf64_Ehdr *header = (const Elf64_Ehdr *)vdso;
	const Elf64_Dyn *dynamic = NULL;
	uintptr_t bias = vdso;

	if (vdso == 0)
		return;
	const Elf64_Phdr *segment = (const Elf64_Phdr *)(vdso + header->e_phoff);
	for (int i = 0; i < header->e_phnum; i++) {
		if (segment[i].p_type == PT_LOAD)
			bias = vdso + segment[i].p_offset - segment[i].p_vaddr;
		else if (segment[i].p_type == PT_DYNAMIC)
			dynamic = (const Elf64_Dyn *)(vdso + segment[i].p_offset);
	}
	if (dynamic == NULL)
		return;
	getcpu = next_function_in(bias, dynamic, "__vdso_getcpu");
	gettime = next_function_in(bias, dynamic, "__vdso_clock_gettime");
}

bool clock_now(uint64_t *now_ns)
{
	struct time time;

	if (gettime == NULL || gettime(CLOCK_MONOTONIC_COARSE, &time) != 0)
		return false;
	*now_ns = (uint64_t)time.seconds * 1000000000u + (uint64_t)time.nanoseconds;
	return true;
}

uint32_t clock_processor(void)
{
	unsigned processor = 0;

	if (getcpu == NULL || getcpu(&processor, NULL, NULL) != 0)
		return 0;
	return processor;
}
