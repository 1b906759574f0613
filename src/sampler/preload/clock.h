/* The time and the CPU, without a system call and without the time stamp counter.
 *
 * Both come from the vDSO, which is looked up here: the libc's clock_gettime falls back to a system call, which kills a program in
 * seccomp's strict mode, and such a program may not read the time stamp counter either (seccomp sets PR_TSC_SIGSEGV). The coarse clock is
 * a number that the kernel writes into a shared page at each tick, every 1 to 10 ms. */
#ifndef FRAGPROF_CLOCK_H
#define FRAGPROF_CLOCK_H

#include "platform.h"

/* Looks for the vDSO's functions. `vdso` is its ELF header (AT_SYSINFO_EHDR), or 0. */
void clock_resolve(uintptr_t vdso);
/* CLOCK_MONOTONIC_COARSE in nanoseconds; false if there is no vDSO. */
bool clock_now(uint64_t *now_ns);
/* The CPU that this thread runs on, or did a moment ago; 0 if not known. */
uint32_t clock_processor(void);

#endif
