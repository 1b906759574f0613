/* Facilities of the compiler and the machine: the library uses nothing else. No libc function is called between a program and its malloc
 * or free, and no header of a libc is needed except elf.h, which contains only layouts. */
#ifndef FRAGPROF_PLATFORM_H
#define FRAGPROF_PLATFORM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if !defined(__x86_64__) && !defined(__aarch64__)
#error "the sampler supports x86-64 and arm64: its probes name registers"
#endif

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)

/* The library hides everything except these, to which a program's references bind. */
#define EXPORT __attribute__((visibility("default")))
/* Keeps a rare path from using the registers and cache lines of the hot one. */
#define RARE __attribute__((noinline, cold))
/* Data on separate cache lines: data that every thread reads must not share a line with data that some thread writes. */
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
