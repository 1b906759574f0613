/* The limit on the sample rate: above it, the interval grows.
 *
 * Each CPU has a debt, and so has each thread. A sample adds 1 to both, and they are paid off at a steady rate, the limit. If the larger
 * one is from d to d + 1 times LIMIT_BURST, intervals are drawn 2^d times as long as usual. So a program that allocates steadily is sampled
 * exactly at the limit; in any period, however the program behaves, there are on each CPU, and in each thread, at most
 *
 *     limit * seconds + LIMIT_BURST * (doublings + 1) + threads
 *
 * samples, where `doublings` are those that bring its rate below the limit: a debt of that many bursts does not grow further (a countdown
 * that was drawn before continues, one for each thread). Call sites whose blocks live have a shorter interval than the usual one, so it may
 * take SITE_FINER doublings more than of the usual one. When the program allocates less, the debt is paid off and the interval shrinks.
 *
 * CPUs have a debt because a hundred threads that share a CPU share its time; threads have one because a thread that moves from CPU to CPU
 * has the time of one. So a program that keeps its CPUs busy pays the same share of their time whatever the number of its threads; one that
 * is idle most of the time pays at most that share of the machine's time. */
#ifndef FRAGPROF_LIMIT_H
#define FRAGPROF_LIMIT_H

#include "platform.h"

/* Samples per second on each CPU and in each thread. A sample costs 3 us and its free 1 us in a loop (`make bench-sampler`), and both
 * together 10 to 22 us in whole programs, with deeper stacks and cold caches. 250 of them take a quarter to half a percent of a CPU; the
 * rest of one percent is for the cost of every call. */
#define LIMIT_SAMPLES_PER_SECOND 250u
/* This would be one sample per microsecond: above it, there is no limit. */
#define LIMIT_SAMPLES_PER_SECOND_MAX 1000000u
/* Samples between one doubling and the next: more than in a tick of the coarse clock (10 ms at most), otherwise the interval would change
 * at each tick; and few enough that a burst costs little: 64 samples take a millisecond. */
#define LIMIT_BURST 64u
/* The interval grows to at most a million times its length: from 512 KiB to 512 GiB. */
#define LIMIT_DOUBLINGS_MAX 20u

/* The debt of a CPU or a thread. */
struct debt {
	/* When it is paid off, in nanoseconds of the clock; in the past = no debt. */
	uint64_t paid_ns;
};

/* Adds a sample to the debt, if there was one, and returns how many times the interval is to be doubled. `each_ns`: the time in which a
 * sample is paid off. */
uint32_t limit_step(struct debt *debt, uint64_t now_ns, uint64_t each_ns, bool sampled);

#endif
