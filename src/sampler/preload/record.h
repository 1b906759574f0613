/* Every call, into the memory shared with a recorder (ring.h).
 *
 * For each function of the allocator: record_alloc after the block was received, record_free before it is given back. So in the order of the
 * tickets a block's free comes before the next allocation at its address, whatever the threads do.
 *
 * While no recorder is there, or none any more, a call costs a load, a comparison and a jump. Nothing waits for the reader: what finds no
 * free chunk is counted and lost. The exceptions are the start of a process, a child of fork, and code that was loaded since: there the
 * reader has to look at the process before it goes on, for which it has a second. */
#ifndef FRAGPROF_RECORD_H
#define FRAGPROF_RECORD_H

#include "recorder_thread.h"
#include "ring.h"

#define RECORD_ON 1u
/* RECORD_ON while calls are recorded. In memory that a child of fork finds empty (MADV_WIPEONFORK). */
extern const volatile uint32_t *record_state __attribute__((visibility("hidden")));

/* Attaches, if that has not been tried; a forked child too. */
bool record_attach(void);
/* The path of the shared memory, from the environment; before the first event if possible. */
void record_set_path(const char *path);
#ifdef FRAGPROF_ATTACHED
/* Whether a reader takes the events. */
bool record_has_reader(void);
/* Records into the shared memory of this file from now on, as soon as its reader has looked at the process. While there is no other one. */
bool record_begin(int file);
/* Records nothing more. */
void record_end(void);
#endif
/* Whether calls of malloc reach the library. */
void record_set_in_front(bool in_front);

/* `function` is the function called, NULL = an operator of C++ or a function of jemalloc; `caller` who called it. */
void record_alloc(void *pointer, size_t size_bytes, uint32_t how, const void *function, const struct caller *caller);
void record_free(void *pointer, const void *function, const struct caller *caller);
void record_realloc_free(void *pointer);
void record_realloc_fail(void *pointer);
/* An allocation failed. */
void record_failed(void);
/* A call of a thread without a state is counted as lost; false. */
bool record_without_thread(bool is_free);

/* `how`: log2 of the alignment asked for, and RECORD_ZEROED. */
#define RECORD_ZEROED 64u

/* Whether calls are recorded, and this one, of whose kind it is said, can be: if the thread has no state, it is counted. */
static inline bool recording(bool is_free)
{
	if (unlikely(*record_state != RECORD_ON) && !record_attach())
		return false;
	return likely(recorder_thread_known()) || record_without_thread(is_free);
}

/* As sample_is_inner (sample.h). */
#define INNER_MAX 16
static inline bool record_is_inner(void)
{
	struct recorder_thread *thread = &this_thread;

	return unlikely(thread->outer_sp != 0) && stack_pointer() < thread->outer_sp && ++thread->inner_skipped <= INNER_MAX;
}

/* The call's block, recorded unless a call within did: for operator new, whose innermost call counts. */
#define RECORD_INNER(size, call)                                                                     \
	({                                                                                           \
		uint32_t recorded_ = this_thread.recorded;                                       \
		void *pointer_ = (call);                                                             \
		if (likely(pointer_ != NULL && this_thread.recorded == recorded_))               \
			record_alloc(pointer_, (size), 0, NULL, &CALLER());              \
		pointer_;                                                                            \
	})

/* For operators.c, strings.c and allocx.c, which are built with the sampler or with this: the sampler's names. */
struct sampled {
	uint8_t unused;
};
#define listening_alloc() recording(false)
#define listening_free() recording(true)
#define set_may_hold(pointer) ((pointer) != NULL)
#define SAMPLE_INNER(size, call) RECORD_INNER(size, call)
#define NOTE_CALLER_OF_NEW() ((void)0)
#define sample_free(pointer) record_free((pointer), NULL, &CALLER())
#define sample_count(pointer, size) record_alloc((pointer), (size), 0, NULL, &CALLER())
#define sample_take(pointer, sampled) ({ (void)(sampled); record_realloc_free(pointer); true; })
#define sample_put_back(pointer, sampled) ({ (void)(sampled); record_realloc_fail(pointer); })

#endif
