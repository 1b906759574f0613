/* Which allocations are sampled.
 *
 * Every byte that a thread allocates is a sample point with probability 1/T, independently (T = the interval, 512 KiB unless
 * FRAGPROF_SAMPLE_BYTES sets another). The distance to the thread's next point is drawn once and counted down, so an allocation without a
 * point costs a subtraction and a branch. One with n points is reported with the weight n * T, whose mean is its size: sums of weights are
 * unbiased, and their variance is at most T times the sum. The draw is memoryless, so a thread that ends in the middle of a countdown, a
 * listener that attaches and detaches, and a fork cause no bias.
 *
 * T is not the same for all: blocks of call sites that live have a smaller one than those that die young (site.h). For this, points are
 * drawn at a distance that is finer than any T, and thinned by call site.
 *
 * If samples are too frequent, T is doubled (limit.h). It changes only between allocations, when the countdown is drawn again: at a sample,
 * and at checks in between, because a thread with a long countdown would otherwise allocate gigabytes before T is reduced again. T then
 * depends on the past, never on the next draw, so each weight still has its block's size as its mean, and a sum's variance is estimated by
 * the sum of T * weight. Each sample is reported with the T that it was drawn with. */
#ifndef FRAGPROF_SAMPLE_H
#define FRAGPROF_SAMPLE_H

#include "limit.h"
#include "probes.h"
#include "set.h"

#define SAMPLE_BYTES_DEFAULT (512u << 10)
/* 1 samples every allocation with its size as its weight, so that the sampler can be checked to the byte; from there to about 16 the
 * draw's rounding error is noticeable (relative error 1/(12 T^2)). Above the largest, nothing would ever be sampled. */
#define SAMPLE_BYTES_MIN 1u
#define SAMPLE_BYTES_MAX (1ull << 40)

/* A thread's state. Zero at its start. */
struct thread {
	/* Bytes that can be allocated before the next sample point or check; negative if one was passed and is not handled yet. */
	int64_t left_bytes;
	/* At a check: bytes from there to the sample point. */
	int64_t beyond_bytes;
	/* State of the random numbers; 0 before the first. */
	uint64_t random;
	/* Countdowns that ran out so far. */
	uint64_t run_out;
	/* The stack pointer of a call in progress whose inner calls are not to be counted; 0 if there is none. */
	uintptr_t outer_sp;
	/* Sample points of inner calls skipped since. */
	uint32_t inner_skipped;
	/* Doublings, by the limit, with which the countdown was drawn: of the finest interval, or of the only one. */
	uint32_t doublings;
	struct debt debt;
	/* Who called the operator new that is calling malloc. */
	const void *caller_of_new;
};
#include "thread.h"

/* Read from outside, at the exported symbol fragprof_sampler_stats. Fields are only ever added. */
struct fragprof_sampler_stats {
	/* 0x31535046, "FPS1". */
	uint32_t magic;
	/* sizeof, so that a reader knows which fields there are. */
	uint32_t size_bytes;
	/* The interval T, on average over all samples, while they are not too frequent. */
	uint64_t sample_bytes;
	/* 1 if calls to malloc bind to this library; 0 if the program or a library before it has its own; 0 before the start. */
	uint64_t in_front;
	/* Samples emitted: probes alloc, and the sum of their weights. */
	uint64_t samples;
	uint64_t weight_bytes;
	/* Probes free emitted. */
	uint64_t frees;
	/* Samples for whose block the set had no space: the free was emitted immediately. */
	uint64_t overflows;
	uint64_t overflow_weight_bytes;
	/* Maximum number of blocks in the set. */
	uint64_t live_max;
	/* Samples per second, on a CPU or in a thread, above which T is doubled; 0 = it is never doubled. */
	uint64_t samples_per_second;
	/* Samples that were drawn with a T that the limit had doubled, and the longest T of them; 0 = none. */
	uint64_t lengthened;
	uint64_t longest_sample_bytes;
};
extern struct fragprof_sampler_stats fragprof_sampler_stats;

/* Parses an interval; keeps the old one if the text is not valid. */
void sample_set_interval(const char *text);
/* "0": one interval for all call sites. */
void sample_set_by_site(const char *text);
/* Parses the limit, in samples per second and CPU; keeps the old one if the text is not valid. 0 = no limit. */
void sample_set_limit(const char *text);
/* All three by value, before the first draw; what is out of range is kept as it is. */
void sample_configure(uint64_t sample_bytes, uint64_t samples_per_second, bool is_by_site);
/* A seed that differs from process to process. */
void sample_set_seed(uint64_t seed);
/* Handles an allocation that made left_bytes negative. `caller`: the address to which the allocator's function returns. */
void sample(void *pointer, size_t size_bytes, const void *caller);
/* The block is about to be freed: reports it if it was sampled. */
void sample_free(void *pointer);
/* Like sample_free, before a call that may fail and leave the block: returns its sample. */
bool sample_take(void *pointer, struct sampled *sampled);
/* The call failed: the block stays live. */
void sample_put_back(void *pointer, struct sampled sampled);

/* The address to which an exported function returns. */
#define CALLER_ADDRESS() __builtin_return_address(0)

/* Counts an allocation that succeeded. */
static inline void sample_count_of(const void *caller, void *pointer, size_t size_bytes)
{
	struct thread *thread = &sampler_thread;

	thread->left_bytes = (int64_t)((uint64_t)thread->left_bytes - size_bytes);
	if (unlikely(thread->left_bytes < 0))
		sample(pointer, size_bytes, caller);
}
#define sample_count(pointer, size_bytes) sample_count_of(CALLER_ADDRESS(), (pointer), (size_bytes))

/* In an operator new, before it calls malloc. */
#define NOTE_CALLER_OF_NEW()                                              \
	do {                                                              \
		if (listening_alloc())                                    \
			sampler_thread.caller_of_new = CALLER_ADDRESS();  \
	} while (0)

/* One entry point of an allocator may call another by its name, which is interposed here too: musl's calloc calls malloc, its
 * posix_memalign calls aligned_alloc, and so do wrappers and jemalloc's aligned operator new. A block must be counted once.
 *
 * For the functions of C the outermost call counts: the inner one's stack may not be known beyond the libc (Alpine's and Debian's musl
 * have no unwind information). They store the position of their frame. A position left behind by a jump out of a signal handler is below
 * every later outer call and is overwritten; and after INNER_MAX skipped points it is ignored. */
static inline bool sample_is_inner(void)
{
	return unlikely(sampler_thread.outer_sp != 0) && stack_pointer() < sampler_thread.outer_sp;
}

#define SAMPLE_OUTER(caller, size, call)                                                  \
	({                                                                                \
		int64_t left_ = sampler_thread.left_bytes;                                \
		void *pointer_;                                                           \
                                                                                          \
		sampler_thread.outer_sp = stack_pointer();                                \
		pointer_ = (call);                                                        \
		sampler_thread.outer_sp = 0;                                              \
		sampler_thread.inner_skipped = 0;                                         \
		/* Restores the countdown before the inner calls. */                          \
		sampler_thread.left_bytes = left_;                                        \
		if (likely(pointer_ != NULL))                                             \
			sample_count_of((caller), pointer_, (size));                      \
		pointer_;                                                                 \
	})

/* For operator new the innermost call counts: anything counted during the call was this block. Nothing has to be undone if the
 * call is left by an exception. */
#define SAMPLE_INNER(size, call)                                                          \
	({                                                                                \
		int64_t left_ = sampler_thread.left_bytes;                                \
		uint64_t run_out_ = sampler_thread.run_out;                               \
		void *pointer_ = (call);                                                  \
		if (likely(pointer_ != NULL && sampler_thread.left_bytes == left_ &&      \
			   sampler_thread.run_out == run_out_))                           \
			sample_count(pointer_, (size));                                   \
		pointer_;                                                                 \
	})

#endif
