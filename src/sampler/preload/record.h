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

#include "platform.h"
#include "ring.h"
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
extern __thread struct recorder_thread recorder_thread __attribute__((visibility("hidden"), tls_model("initial-exec")));

#define RECORD_ON 1u
/* RECORD_ON while calls are recorded. In memory that a child of fork finds empty (MADV_WIPEONFORK). */
extern const volatile uint32_t *record_state __attribute__((visibility("hidden")));

/* Attaches, if that has not been tried; a forked child too. */
bool record_attach(void);
/* The path of the shared memory, from the environment; before the first event if possible. */
void record_set_path(const char *path);
/* Whether calls of malloc reach the library. */
void record_set_in_front(bool in_front);

/* `function` is the function called, NULL = an operator of C++ or a function of jemalloc; `caller` who called it. */
void record_alloc(void *pointer, size_t size_bytes, uint32_t how, const void *function, const struct caller *caller);
void record_free(void *pointer, const void *function, const struct caller *caller);
void record_realloc_free(void *pointer);
void record_realloc_fail(void *pointer);
/* An allocation failed. */
void record_failed(void);

/* `how`: log2 of the alignment asked for, and RECORD_ZEROED. */
#define RECORD_ZEROED 64u

static inline bool recording(void)
{
	return likely(*record_state == RECORD_ON) || record_attach();
}

/* As sample_is_inner (sample.h). */
#define INNER_MAX 16
static inline bool record_is_inner(void)
{
	struct recorder_thread *thread = &recorder_thread;

	return unlikely(thread->outer_sp != 0) && stack_pointer() < thread->outer_sp && ++thread->inner_skipped <= INNER_MAX;
}

/* The call's block, recorded unless a call within did: for operator new, whose innermost call counts. */
#define RECORD_INNER(size, call)                                                                     \
	({                                                                                           \
		uint32_t recorded_ = recorder_thread.recorded;                                       \
		void *pointer_ = (call);                                                             \
		if (likely(pointer_ != NULL && recorder_thread.recorded == recorded_))               \
			record_alloc(pointer_, (size), 0, NULL, &CALLER());              \
		pointer_;                                                                            \
	})

/* For operators.c and allocx.c, which are built with the sampler or with this: the sampler's names. */
struct sampled {
	uint8_t unused;
};
#define listening_alloc() recording()
#define listening_free() recording()
#define set_may_hold(pointer) ((pointer) != NULL)
#define SAMPLE_INNER(size, call) RECORD_INNER(size, call)
#define NOTE_CALLER_OF_NEW() ((void)0)
#define sample_free(pointer) record_free((pointer), NULL, &CALLER())
#define sample_count(pointer, size) record_alloc((pointer), (size), 0, NULL, &CALLER())
#define sample_take(pointer, sampled) ({ (void)(sampled); record_realloc_free(pointer); true; })
#define sample_put_back(pointer, sampled) ({ (void)(sampled); record_realloc_fail(pointer); })

#endif
