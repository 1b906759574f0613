/* What the compiler and the machine give: the library uses nothing else. No libc function is called on a program's way through malloc
 * or free, and no header of a libc is needed but elf.h, which holds only layouts. */
#ifndef FRAGPROF_PLATFORM_H
#define FRAGPROF_PLATFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the sampler knows x86-64 and arm64: its probes name registers"
#endif

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* The library hides everything; these are what a program's references bind to. */
#define EXPORT __attribute__((visibility("default")))
/* Keeps a rare path out of the hot one's registers and cache lines. */
#define RARE __attribute__((noinline, cold))
/* Data of its own cache lines: what every thread reads must not share a line with what some thread writes. */
#define OWN_LINES __attribute__((aligned(64)))

static inline uintptr_t stack_pointer(void)
{
	uintptr_t sp;

#ifdef __x86_64__
	__asm__ volatile("movq %%rsp, %0" : "=r"(sp));
#else
	__asm__ volatile("mov %0, sp" : "=r"(sp));
#endif
	return sp;
}

#endif
