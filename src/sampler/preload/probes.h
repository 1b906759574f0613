/* The two probes of the otel_memory specification (OpenTelemetry eBPF profiler, design document 00003):
 *
 *   otel_memory:alloc(pointer, size_bytes, weight_bytes)   at a sampled allocation
 *   otel_memory:free(pointer)                              at the free of a sampled allocation
 *
 * A probe is a note of type 3, owner "stapsdt", in .note.stapsdt (SystemTap's wiki, "UserSpaceProbeImplementation"): address of the
 * probe, address of .stapsdt.base, address of the semaphore, then provider, name and the location of each argument. The first consumer of
 * the specification reads the arguments from the calling convention's registers without evaluating the note, so they are there: rdi, rsi,
 * rdx, or x0, x1, x2.
 *
 * After the specified three, alloc has a fourth argument in rcx or x3: the mean distance of sample points with which this one was drawn.
 * The error of a sum is computed from it, and it changes from sample to sample (limit.h). Readers of three arguments miss only that.
 *
 * The site is a nop, on x86-64 of one byte, which every kernel emulates cheaply. It is deliberately not followed by a five-byte nop: libbpf
 * from 1.7 on would attach to that instead, kernel 6.18 replaces it by a call into a page that fork does not copy, and children of a
 * program with a consumer attached would be killed by SIGSEGV at their first sample. */
#ifndef FRAGPROF_PROBES_H
#define FRAGPROF_PROBES_H

#include "platform.h"

/* Number of consumers attached to each probe. The kernel counts here, in the process's own copy of the page (uprobe reference counter):
 * the section must be writable and must have bytes in the file. */
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
