/* The threads' slots. See thread.h. */
#include "sample.h"

/* Slots that a thread may have, from its first place on. */
#define PLACES 8u

OWN_LINES struct thread_slot thread_slots[THREADS];

RARE struct thread *thread_elsewhere(uintptr_t pointer)
{
	uint32_t home = thread_home(pointer, THREAD_BITS);
	struct thread_slot *slot;

	for (uint32_t i = 0; i < PLACES; i++) {
		slot = &thread_slots[(home + i) % THREADS];
		if (__atomic_load_n(&slot->owner, __ATOMIC_RELAXED) == pointer)
			return &slot->thread;
	}
	for (uint32_t i = 0; i < PLACES; i++) {
		uintptr_t none = 0;

		slot = &thread_slots[(home + i) % THREADS];
		if (__atomic_compare_exchange_n(&slot->owner, &none, pointer, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return &slot->thread;
	}
	/* Threads with long lives and those that are gone cannot be told apart: any of the places. */
	slot = &thread_slots[(home + (uint32_t)(pointer >> 12) % PLACES) % THREADS];
	__atomic_store_n(&slot->owner, pointer, __ATOMIC_RELAXED);
	slot->thread = (struct thread){ 0 };
	return &slot->thread;
}
