/* The threads' states. See recorder_thread.h. */
#include "recorder_thread.h"

#ifdef FRAGPROF_ATTACHED

#include "system.h"

/* Slots that a thread may have, from its first place on. */
#define PLACES 8u

OWN_LINES struct recorder_slot recorder_slots[RECORDER_THREADS];

uint32_t recorder_thread_number_slow(void)
{
	return (uint32_t)system_call(CALL_GETTID, 0, 0, 0, 0, 0, 0);
}

/* The slot's thread has ended, or forked and is the child now. The chunk of an ended one is the reader's, which sees that it has ended. */
static struct recorder_thread *renewed(struct recorder_slot *slot, uint32_t number)
{
	uint32_t is_forking = slot->thread.is_forking;

	if (slot->thread.tid != number) {
		slot->thread = (struct recorder_thread){ 0 };
		slot->thread.is_forking = is_forking;
		slot->thread.tid = number;
	}
	return &slot->thread;
}

RARE struct recorder_thread *recorder_thread_elsewhere(uintptr_t pointer, uint32_t number)
{
	uint32_t home = thread_home(pointer, RECORDER_THREAD_BITS);

	for (uint32_t i = 0; i < PLACES; i++) {
		struct recorder_slot *slot = &recorder_slots[(home + i) % RECORDER_THREADS];

		if (__atomic_load_n(&slot->owner, __ATOMIC_RELAXED) == pointer)
			return renewed(slot, number);
	}
	for (uint32_t i = 0; i < PLACES; i++) {
		struct recorder_slot *slot = &recorder_slots[(home + i) % RECORDER_THREADS];
		uintptr_t none = 0;

		if (__atomic_compare_exchange_n(&slot->owner, &none, pointer, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			return renewed(slot, number);
	}
	return NULL;
}

#else

__thread struct recorder_thread this_thread;

#endif
