/* Simulates the distances of call sites (site.c) under the limit on samples (limit.c), in virtual time: sites that allocate bytes at a rate, in
 * blocks with a mean lifetime. The estimated live bytes at the end are compared with the true ones, many times; with one distance for all
 * sites too. Prints for each program, way and site: name, "one" or "site", samples a second, live bytes, the mean of the relative errors, the
 * square root of the mean of their squares, and how many of them lie within 1.96 standard errors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "limit.c"
#include "site.c"

#define USUAL_BYTES 524288
#define EACH_NS (1000000000u / LIMIT_SAMPLES_PER_SECOND)
/* Of the coarse clock. */
#define TICK_NS 4000000u
#define SECONDS 60
#define RUNS 50
#define SITES_MAX 17
#define FOREVER_S 1e9

struct place {
	double bytes_per_second, lifetime_s, start_s;
};

struct program {
	const char *name;
	int count;
	struct place places[SITES_MAX];
};

/* 2.9 GiB/s that die at once, and a leak of 0.8 MB/s. */
static const struct program drowned = { "drowned", 2, { { 3.1e9, 4e-6, 0 }, { 0.8e6, FOREVER_S, 0 } } };
/* A cache that turns over, and a leak. */
static const struct program cache = { "cache", 2, { { 1e8, 100, 0 }, { 0.8e6, FOREVER_S, 0 } } };
/* Requests whose blocks die at once, buffers of some seconds, and a leak that begins in the middle. */
static const struct program server = {
	"server", 17,
	{ { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 }, { 2e7, 1e-5, 0 },
	  { 2e7, 1e-5, 0 }, { 1e6, 2, 0 }, { 1e6, 4, 0 }, { 1e6, 6, 0 }, { 1e6, 8, 0 }, { 1e6, 10, 0 }, { 1e6, 12, 0 }, { 1e6, 14, 0 },
	  { 1e6, 16, 0 }, { 1e6, FOREVER_S, 30 } }
};

/* A sampled block, and when it is freed. */
struct block {
	double end_s;
	int place;
	uint64_t weight;
};

/* The next to be freed first. */
static struct block heap[1 << 20];
static int held;

static void push(struct block block)
{
	int at = held++;

	for (; at > 0 && heap[(at - 1) / 2].end_s > block.end_s; at = (at - 1) / 2)
		heap[at] = heap[(at - 1) / 2];
	heap[at] = block;
}

static struct block pop(void)
{
	struct block first = heap[0], last = heap[--held];
	int at = 0;

	for (int child; (child = 2 * at + 1) < held; at = child) {
		child += child + 1 < held && heap[child + 1].end_s < heap[child].end_s;
		if (heap[child].end_s >= last.end_s)
			break;
		heap[at] = heap[child];
	}
	heap[at] = last;
	return first;
}

static uint64_t state = 88172645463325252u;

static uint64_t next_random(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return state * 0x2545f4914f6cdd1du;
}

static double exponential(double mean)
{
	return -mean * log(((double)(next_random() >> 11) + 1) / 9007199254740993.0);
}

static uint64_t ticks_ns(double seconds)
{
	return (uint64_t)(seconds * 1e9) / TICK_NS * TICK_NS;
}

static int place_of(const struct program *program, double sum)
{
	double at = sum * ((double)(next_random() >> 11) / 9007199254740992.0);
	int place = 0;

	while (place < program->count - 1 && at > program->places[place].bytes_per_second)
		at -= program->places[place++].bytes_per_second;
	return place;
}

/* Returns the number of samples, and adds the live samples' weights and their squares by place. */
static double run(const struct program *program, bool by_site, double *weights, double *squares)
{
	struct debt debt = { 0 };
	uint32_t limit = 0;
	double sum = 0, samples = 0, end_s = 1 + SECONDS;

	memset(sites, 0, sizeof sites);
	live_bytes = scale = begun = held = 0;
	for (int i = 0; i < program->count; i++)
		sum += program->places[i].bytes_per_second;
	for (double at_s = 1;;) {
		uint32_t candidates = by_site ? limit : SITE_FINER + limit;
		uint64_t found_bytes = (uint64_t)USUAL_BYTES >> SITE_FINER << candidates;
		uint32_t doublings = candidates;

		at_s += exponential((double)found_bytes / sum);
		if (at_s >= end_s)
			break;
		while (held > 0 && heap[0].end_s <= at_s) {
			struct block freed = pop();

			site_dead((uint32_t)freed.place, freed.weight, ticks_ns(freed.end_s));
		}
		int place = place_of(program, sum);
		if (at_s < 1 + program->places[place].start_s)
			continue;
		if (by_site)
			doublings = site_doublings((uint32_t)place, found_bytes, limit, USUAL_BYTES, ticks_ns(at_s));
		bool kept = (next_random() >> 10 & ((1ull << (doublings - candidates)) - 1)) == 0;
		if (kept)
			site_kept((uint32_t)place);
		limit = limit_step(&debt, ticks_ns(at_s), EACH_NS, kept);
		if (!kept)
			continue;
		uint64_t weight = (uint64_t)USUAL_BYTES >> SITE_FINER << doublings;
		samples++;
		site_live((uint32_t)place, weight, ticks_ns(at_s));
		push((struct block){ at_s + exponential(program->places[place].lifetime_s), place, weight });
	}
	while (held > 0) {
		struct block block = pop();

		if (block.end_s <= end_s)
			continue;
		weights[block.place] += (double)block.weight;
		squares[block.place] += (double)block.weight * (double)block.weight;
	}
	return samples;
}

static void compare(const struct program *program, bool by_site)
{
	double mean[SITES_MAX] = { 0 }, square[SITES_MAX] = { 0 }, truth[SITES_MAX], samples = 0;
	int inside[SITES_MAX] = { 0 };

	for (int i = 0; i < program->count; i++) {
		const struct place *place = &program->places[i];
		double lasted_s = SECONDS - place->start_s;

		/* What a process that began then has: rate * lifetime * (1 - exp(-time / lifetime)). */
		truth[i] = place->lifetime_s < FOREVER_S
				   ? place->bytes_per_second * place->lifetime_s * -expm1(-lasted_s / place->lifetime_s)
				   : place->bytes_per_second * lasted_s;
	}
	for (int r = 0; r < RUNS; r++) {
		double weights[SITES_MAX] = { 0 }, squares[SITES_MAX] = { 0 };

		samples += run(program, by_site, weights, squares);
		for (int i = 0; i < program->count; i++) {
			double error = (weights[i] - truth[i]) / truth[i];
			/* The mean distance of its samples, by which the error of the true value is known. */
			double distance = weights[i] > 0 ? squares[i] / weights[i] : USUAL_BYTES;

			mean[i] += error / RUNS;
			square[i] += error * error / RUNS;
			inside[i] += fabs(error) <= 1.96 * sqrt(distance / truth[i]);
		}
	}
	/* Of what has less than an interval that lives there is nothing to say. */
	for (int i = 0; i < program->count; i++)
		if (truth[i] > USUAL_BYTES)
			printf("%s %s %.1f %.0f %.4f %.4f %d\n", program->name, by_site ? "site" : "one", samples / RUNS / SECONDS, truth[i],
			       mean[i], sqrt(square[i]), inside[i]);
}

int main(void)
{
	const struct program *const programs[] = { &drowned, &cache, &server };

	for (int i = 0; i < 3; i++)
		for (int by_site = 0; by_site < 2; by_site++)
			compare(programs[i], by_site);
	return 0;
}
