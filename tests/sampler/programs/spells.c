/* Simulates the limit on samples for worst-case programs, in virtual time: threads that allocate bytes per nanosecond and take turns, on
 * one CPU or moved to another at each turn, and a clock that ticks. Prints for each: name, samples, milliseconds, the maximum number of
 * samples by which any interval exceeded the limit, how many are allowed, and the doublings at the end. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limit.c"

#define INTERVAL 524288.0
#define TICK_NS 10000000u
#define EACH_NS (1000000000u / LIMIT_SAMPLES_PER_SECOND)
#define THREADS_MAX 100
#define PROCESSORS_MAX 16

static uint64_t state = 88172645463325252u;

static double uniform(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return ((double)(state >> 11) + 1) / 9007199254740993.0;
}

static double countdown(uint32_t doublings)
{
	return -log(uniform()) * ldexp(INTERVAL, (int)doublings);
}

/* Bytes per nanosecond, given the time and, for the adversarial program, the doublings. */
typedef double program(double now_ns, uint32_t doublings);

static double steady(double now_ns, uint32_t doublings)
{
	(void)now_ns, (void)doublings;
	return 100;
}

static double slow(double now_ns, uint32_t doublings)
{
	(void)now_ns, (void)doublings;
	return 0.1;
}

/* Active for a fifth of a period. */
static double bursts(double now_ns, double period_ns)
{
	return fmod(now_ns, period_ns) < period_ns / 5 ? 100 : 0;
}

static double short_bursts(double now_ns, uint32_t doublings)
{
	(void)doublings;
	return bursts(now_ns, 15e6);
}

static double long_bursts(double now_ns, uint32_t doublings)
{
	(void)doublings;
	return bursts(now_ns, 2e9);
}

/* Allocates as fast as it can whenever samples are frequent, and waits while they are not. */
static double adversary(double now_ns, uint32_t doublings)
{
	(void)now_ns;
	return doublings == 0 ? 100 : 0;
}

static uint32_t step(struct debt *processor, struct debt *thread, double now_ns, bool sampled)
{
	uint64_t tick_ns = (uint64_t)now_ns / TICK_NS * TICK_NS;
	uint32_t of_processor = limit_step(processor, tick_ns, EACH_NS, sampled), of_thread = limit_step(thread, tick_ns, EACH_NS, sampled);

	return of_processor > of_thread ? of_processor : of_thread;
}

static void run(const char *name, program *rate, double fastest, int threads, int places)
{
	static double left[THREADS_MAX];
	const double end_ns = 20e9, turn_ns = 1e5;
	struct debt processors[PROCESSORS_MAX] = { 0 }, debts[THREADS_MAX] = { 0 };
	uint32_t doublings = 0;
	double over = 0, least = 0, samples = 0;

	for (int i = 0; i < threads; i++)
		left[i] = countdown(0);
	/* The threads take turns. */
	for (double turn = 0; turn * turn_ns < end_ns; turn++) {
		int i = (int)fmod(turn, threads);
		double now_ns = turn * turn_ns, rest_ns = turn_ns;

		struct debt *processor = &processors[(int)fmod(turn, places)];

		doublings = step(processor, &debts[i], now_ns, false);
		for (;;) {
			double bytes = rate(now_ns, doublings) * rest_ns;

			if (bytes < left[i]) {
				left[i] -= bytes;
				break;
			}
			double took_ns = left[i] / rate(now_ns, doublings);
			now_ns += took_ns;
			rest_ns -= took_ns;
			/* The minimum of samples - limit * time so far: the start of the worst interval that ends here. */
			least = fmin(least, samples - now_ns / EACH_NS);
			samples++;
			over = fmax(over, samples - now_ns / EACH_NS - least);
			doublings = step(processor, &debts[i], now_ns, true);
			left[i] = countdown(doublings);
		}
	}
	double needed = fmax(0, ceil(log2(fastest * 1e9 / INTERVAL / LIMIT_SAMPLES_PER_SECOND)));
	/* The clock may be a tick behind. */
	double allowed = LIMIT_BURST * (needed + 1) + threads + TICK_NS / EACH_NS;
	printf("%s %.0f %.0f %.0f %.0f %u\n", name, samples, end_ns / 1e6, over, allowed, doublings);
}

int main(void)
{
	struct debt debt = { 0 };

	run("steady", steady, 100, 1, 1);
	run("slow", slow, 0.1, 1, 1);
	run("short_bursts", short_bursts, 100, 1, 1);
	run("long_bursts", long_bursts, 100, 1, 1);
	run("adversary", adversary, 100, 1, 1);
	run("hundred_threads", steady, 100, 100, 1);
	run("moved", steady, 100, 1, PROCESSORS_MAX);
	/* A clock set back by a year, one set ahead by a year, and the longest interval. */
	debt.paid_ns = 31536000000000000u;
	printf("back %u\n", limit_step(&debt, 1000, EACH_NS, true));
	printf("ahead %u\n", limit_step(&debt, 63072000000000000u, EACH_NS, false));
	memset(&debt, 0, sizeof debt);
	uint32_t most = 0;
	for (int i = 0; i < 100000; i++)
		most = limit_step(&debt, 1000, EACH_NS, true);
	printf("most %u\n", most);
	return 0;
}
