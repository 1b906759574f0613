/* Where a thread's state is.
 *
 * In a preloaded library it is a variable in the static thread-local storage: one instruction. An attached library must not take any of that:
 * what is left of it after the start is for libraries that are loaded later, and one that finds none is not loaded. Nor may it have storage
 * that the dynamic linker allocates at a thread's first use: if that fails, the process is ended. So it has a table of its own, by the
 * thread pointer, which on both machines is the address of the thread's control block under every libc. A thread that has ended leaves its
 * slot to the next one with that address. If all slots that a thread may have are taken, it takes one of them: the other thread, if there
 * still is one, gets a new state at its next call. The draw is memoryless, so a new state causes no bias. */
#ifndef FRAGPROF_THREAD_H
#define FRAGPROF_THREAD_H

#include "thread_pointer.h"

#ifdef FRAGPROF_ATTACHED

/* 1 MiB, of which a page exists for each 32 threads at most. */
#define THREAD_BITS 13u
#define THREADS (1u << THREAD_BITS)

struct thread_slot {
	/* The thread pointer; 0 = free. */
	uintptr_t owner;
	struct thread thread;
} OWN_LINES;
extern struct thread_slot thread_slots[THREADS] __attribute__((visibility("hidden")));

/* The slot of a thread that is not at its first place. */
struct thread *thread_elsewhere(uintptr_t pointer);

/* The thread's state, if it is at its first place, or NULL: for the hot path, which makes no call. */
static inline struct thread *thread_at_home(void)
{
	uintptr_t pointer = thread_pointer();
	struct thread_slot *slot = &thread_slots[thread_home(pointer, THREAD_BITS)];

	return likely(slot->owner == pointer) ? &slot->thread : NULL;
}

static inline struct thread *thread_state(void)
{
	struct thread *thread = thread_at_home();

	return likely(thread != NULL) ? thread : thread_elsewhere(thread_pointer());
}
#define sampler_thread (*thread_state())

#else

extern __thread struct thread sampler_thread __attribute__((visibility("hidden"), tls_model("initial-exec")));

static inline struct thread *thread_at_home(void)
{
	return &sampler_thread;
}

#endif
#endif
