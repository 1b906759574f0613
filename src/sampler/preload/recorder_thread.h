/* Where a thread's state is, in a library that records every call.
 *
 * In a preloaded library it is a variable in the static thread-local storage. An attached library must not take any of that (thread.h), so it
 * has a table by the thread pointer. Unlike a sampler's, a state here is never taken from a thread that may live: it is in the middle of a
 * chunk of the shared memory. A thread that finds no place has none, and its calls are counted as lost. A new thread at the address of an
 * ended one is told from it by its number, which the C library keeps beside the control block. */
#ifndef FRAGPROF_RECORDER_THREAD_H
#define FRAGPROF_RECORDER_THREAD_H

#include "ring.h"
#include "thread_pointer.h"
#include "walk.h"

/* A thread's state. Zero at its start. */
struct recorder_thread {
	/* The next free cell, and the end of the chunk. */
	struct fp_ring_event *next, *end;
	struct fp_ring_chunk *chunk;
	uint32_t chunk_number;
	/* The process for which these are; another one after a fork. */
	uint32_t owner;
	uint32_t tid;
	/* A call is being recorded: another one can only be of a signal handler. */
	uint32_t is_busy;
	uint32_t nested;
	/* The number of chunks given back at the last search for one that failed, plus 1; 0 = it did not fail. */
	uint32_t full_at;
	uint32_t refused;
	/* A fork of this thread is in progress. */
	uint32_t is_forking;
	/* Calls recorded so far: an outer call that sees it change leaves the block to the inner one. */
	uint32_t recorded;
	/* The stack pointer of a call in progress whose inner calls are not recorded; 0 if there is none. */
	uintptr_t outer_sp;
	uint32_t inner_skipped;
	struct readable readable;
	struct walk_last last;
};
#ifdef FRAGPROF_ATTACHED

/* 11 MiB, of which a page or two exist for each thread. */
#define RECORDER_THREAD_BITS 12u
#define RECORDER_THREADS (1u << RECORDER_THREAD_BITS)

struct recorder_slot {
	/* The thread pointer; 0 = free. */
	uintptr_t owner;
	struct recorder_thread thread;
} OWN_LINES;
extern struct recorder_slot recorder_slots[RECORDER_THREADS] __attribute__((visibility("hidden")));

/* The calling thread's number, without a system call where the C library's layout is known. */
uint32_t recorder_thread_number_slow(void);
static inline uint32_t recorder_thread_number(void)
{
#ifdef __x86_64__
	uint32_t number;

	/* glibc, nptl/descr.h: struct pthread is the control block; its `tid` follows 704 bytes of header and a list's two pointers, in every
	 * version for x86-64 since 2.4. record_begin compares it with the kernel's answer before anything is recorded. */
	__asm__("movl %%fs:0x2d0, %0" : "=r"(number));
	return number;
#else
	return recorder_thread_number_slow();
#endif
}

/* The state of a thread that is not at its first place, or is new; NULL = there is no place. */
struct recorder_thread *recorder_thread_elsewhere(uintptr_t pointer, uint32_t number);

static inline struct recorder_thread *recorder_thread_state(void)
{
	uintptr_t pointer = thread_pointer();
	uint32_t number = recorder_thread_number();
	struct recorder_slot *slot = &recorder_slots[thread_home(pointer, RECORDER_THREAD_BITS)];

	if (likely(slot->owner == pointer && slot->thread.tid == number))
		return &slot->thread;
	return recorder_thread_elsewhere(pointer, number);
}
#define this_thread (*recorder_thread_state())

/* Whether the thread has a state: only then is it used. */
static inline bool recorder_thread_known(void)
{
	return recorder_thread_state() != NULL;
}

#else

extern __thread struct recorder_thread this_thread __attribute__((visibility("hidden"), tls_model("initial-exec")));

static inline bool recorder_thread_known(void)
{
	return true;
}

#endif
#endif
