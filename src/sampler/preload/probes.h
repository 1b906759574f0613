/* The two probes of the otel_memory contract (OpenTelemetry eBPF profiler, design document 00003):
 *
 *   otel_memory:alloc(pointer, size_bytes, weight_bytes)   at a sampled allocation
 *   otel_memory:free(pointer)                              at the free of a sampled allocation
 *
 * A probe is a note of type 3, owner "stapsdt", in .note.stapsdt (SystemTap's wiki, "UserSpaceProbeImplementation"): address of the
 * probe, address of .stapsdt.base, address of the semaphore, then provider, name and where each argument is. The contract's first
 * consumer reads the arguments from the calling convention's registers without looking at the note, so they are there: rdi, rsi, rdx, or
 * x0, x1, x2.
 *
 * Behind the contract's three, alloc has a fourth argument in rcx or x3: the mean distance of sample points by which this one was drawn.
 * The error of a sum is computed from it, and it changes from sample to sample (limit.h). Readers of three arguments miss nothing else.
 *
 * The site is a nop, on x86-64 of one byte, which every kernel emulates cheaply. It is deliberately not followed by a five-byte nop: libbpf from
 * 1.7 on would attach to that instead, kernel 6.18 turns it into a call of a page that is not copied by fork, and children of a program with a
 * consumer attached would die of SIGSEGV at their first sample. */
#ifndef FRAGPROF_PROBES_H
#define FRAGPROF_PROBES_H

#include "platform.h"

/* How many consumers are attached to each probe. The kernel counts here, in the process's own copy of the page (uprobe reference
 * counter): the section has to be writable and has to have bytes in the file. */
extern volatile unsigned short otel_memory_alloc_semaphore __attribute__((visibility("hidden")));
extern volatile unsigned short otel_memory_free_semaphore __attribute__((visibility("hidden")));

static inline bool listening_alloc(void)
{
	return unlikely(otel_memory_alloc_semaphore != 0);
}

static inline bool listening_free(void)
{
	return unlikely(otel_memory_free_semaphore != 0);
}

void emit_alloc(void *pointer, size_t size_bytes, uint64_t weight_bytes, uint64_t interval_bytes);
void emit_free(void *pointer);

#endif
