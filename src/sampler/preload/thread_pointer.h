/* The thread pointer, which on both machines is the address of the thread's control block under every libc: the key of tables by thread. */
#ifndef FRAGPROF_THREAD_POINTER_H
#define FRAGPROF_THREAD_POINTER_H

#include "platform.h"

static inline uintptr_t thread_pointer(void)
{
	uintptr_t pointer;

#ifdef __x86_64__
	/* System V ABI, "Thread-Local Storage": the word there is its own address. */
	__asm__("movq %%fs:0, %0" : "=r"(pointer));
#else
	__asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
	return pointer;
}

/* The first place of a thread in a table of 2^bits. */
static inline uint32_t thread_home(uintptr_t pointer, uint32_t bits)
{
	return (uint32_t)((pointer * 0x9e3779b97f4a7c15u) >> (64 - bits));
}

#endif
