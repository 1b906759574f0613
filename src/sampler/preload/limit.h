/* The limit on the sample rate: above it, the interval grows.
 *
 * Each processor has a debt, and each thread. A sample adds 1 to both, and they are paid off at a steady rate, the limit. Where the larger
 * one is from d to d + 1 times LIMIT_BURST, intervals are drawn 2^d times as long as usual. So a program that allocates steadily is sampled
 * at just the limit; in any spell, however the program behaves, there are on each processor, and in each thread, at most
 *
 *     limit * seconds + LIMIT_BURST * (doublings + 1) + threads
 *
 * samples, where `doublings` are those that bring its rate below the limit: a debt of that many bursts grows no more (a countdown that was
 * drawn before counts on, one for each thread). When it allocates less, the debt goes away by itself and the interval with it.
 *
 * A processor's debt, because a hundred threads that share a processor share its time; a thread's, because one that is moved from processor
 * to processor has the time of one. A program that keeps its processors busy so pays the same part of their time whatever its threads; one
 * that is idle most of the time pays at most that part of the machine's. */
#ifndef FRAGPROF_LIMIT_H
#define FRAGPROF_LIMIT_H

#include "platform.h"

/* Samples a second on each processor and in each thread. A sample costs 3 us and its free 1 us in a loop (`make bench-sampler`), and both 10
 * to 22 us in whole programs, whose stacks are deeper and whose caches are cold by then. 250 of them take a quarter to half a
 * percent of a processor; the rest of one percent is for what every call costs. */
#define LIMIT_SAMPLES_PER_SECOND 250u
/* As many would be a sample a microsecond: beyond, there is no limit. */
#define LIMIT_SAMPLES_PER_SECOND_MAX 1000000u
/* Samples between one doubling and the next. More than come in a tick of the coarse clock (10 ms at most), or the interval would change at
 * each tick; few enough that a burst costs little: 64 samples take a millisecond. */
#define LIMIT_BURST 64u
/* The interval grows to a million times its length at most: from 512 KiB to 512 GiB. */
#define LIMIT_DOUBLINGS_MAX 20u

/* The debt of a processor or a thread. */
struct debt {
	/* When it is paid off, in nanoseconds of the clock; in the past = no debt. */
	uint64_t paid_ns;
};

/* Adds a sample to the debt, if there was one, and returns how many times the interval is to be doubled. `each_ns`: the time in which a
 * sample is paid off. */
uint32_t limit_step(struct debt *debt, uint64_t now_ns, uint64_t each_ns, bool sampled);

#endif
