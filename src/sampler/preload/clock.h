/* The time and the processor, without a system call and without the time stamp counter.
 *
 * Both come from the vDSO, found by hand: the libc's clock_gettime falls back to a system call, which a program in a strict seccomp does
 * not survive, and such a program may not read the time stamp counter either (seccomp sets PR_TSC_SIGSEGV). The coarse clock is a number
 * that the kernel writes into a shared page at each tick, every 1 to 10 ms. */
#ifndef FRAGPROF_CLOCK_H
#define FRAGPROF_CLOCK_H

#include "platform.h"

/* Looks for the vDSO's functions. `vdso` is its ELF header (AT_SYSINFO_EHDR), or 0. */
void clock_resolve(uintptr_t vdso);
/* CLOCK_MONOTONIC_COARSE in nanoseconds; false if there is no vDSO. */
bool clock_now(uint64_t *now_ns);
/* The processor that this thread runs on, or did a moment ago; 0 if it is not known. */
uint32_t clock_processor(void);

#endif
