/* The distances of call sites. See site.h. */
#include "site.h"

#include "limit.h"

/* Units of 2^20 ns, which is nearly a millisecond. */
#define UNIT_BITS 20
/* Time over which bytes are averaged: 8.6 s. */
#define MEMORY_UNITS 8192u
/* Part of the heap above which a site's weight no longer grows with its live bytes. */
#define LARGE_SITE_PART 64

/* In which samples are counted: fine enough that a single one fades. */
#define ONE_SAMPLE 4096u

/* Logarithms to base 2, in 256ths. */
#define LOG_BITS 8
/* Of the common factor, in 65536ths: a step changes it by the 64th of a doubling for each sample too many. */
#define SCALE_BITS 16
#define SCALE_STEP (1 << (SCALE_BITS - 6))
#define SCALE_LIMIT (16 << SCALE_BITS)

struct site {
	/* When the next three were brought up to date. */
	uint32_t updated;
	/* Samples lately, in 4096ths. */
	uint32_t samples;
	/* Bytes allocated lately. */
	uint64_t bytes;
	/* Bytes that lived lately, times units. */
	uint64_t lived;
	/* Weight of its sampled blocks that live. */
	int64_t live;
};

static struct site sites[SITES] OWN_LINES;
/* Weight of all sampled blocks that live. */
static int64_t live_bytes OWN_LINES;
/* The common factor's logarithm, less its usual value. */
static int64_t scale;
/* When the first candidate was found; 0 = not yet. */
static uint64_t begun;

#define LOAD(field) __atomic_load_n(&(field), __ATOMIC_RELAXED)
#define STORE(field, value) __atomic_store_n(&(field), (value), __ATOMIC_RELAXED)

static uint64_t positive(int64_t value)
{
	return value > 0 ? (uint64_t)value : 0;
}

/* `x` > 0. Linear between powers of two: 0.09 too small at most. */
static int32_t log2_of(uint64_t x)
{
	int shift = __builtin_clzll(x);

	return (63 - shift) << LOG_BITS | (int32_t)((x << shift << 1) >> (64 - LOG_BITS));
}

/* What is left of a sum after some time. */
static uint64_t faded(uint64_t sum, uint32_t units)
{
	return sum - sum / (MEMORY_UNITS + (uint64_t)units) * units;
}

static void bring_up_to_date(struct site *site, uint32_t now)
{
	uint32_t since = now - LOAD(site->updated);

	/* The clock of another CPU may be behind. */
	if (since == 0 || since > UINT32_MAX - MEMORY_UNITS)
		return;
	STORE(site->updated, now);
	STORE(site->samples, (uint32_t)((uint64_t)LOAD(site->samples) * MEMORY_UNITS / (MEMORY_UNITS + (uint64_t)since)));
	STORE(site->bytes, faded(LOAD(site->bytes), since));
	if (since > MEMORY_UNITS)
		since = MEMORY_UNITS;
	STORE(site->lived, faded(LOAD(site->lived), since) + positive(LOAD(site->live)) * since);
}

uint32_t site_of(const void *caller, size_t size_bytes)
{
	uint64_t depth = stack_pointer() & 0xff0, size = size_bytes != 0 ? (uint64_t)log2_of(size_bytes) >> (LOG_BITS - 1) : 0;
	uint64_t key = (uintptr_t)caller ^ depth << 44 ^ size << 56;

	return (uint32_t)((key * 0x9e3779b97f4a7c15u) >> (64 - SITE_BITS));
}

static void adjust_scale(int64_t by)
{
	int64_t now = __atomic_add_fetch(&scale, by, __ATOMIC_RELAXED);

	if (now > SCALE_LIMIT || now < -SCALE_LIMIT)
		STORE(scale, now > 0 ? SCALE_LIMIT : -SCALE_LIMIT);
}

uint32_t site_doublings(uint32_t number, uint64_t found_bytes, uint32_t limit, uint64_t usual_bytes, uint64_t now_ns)
{
	struct site *site = &sites[number];
	uint64_t now = now_ns >> UNIT_BITS, since = 0, elapsed, live, large, bytes;
	int32_t doublings;

	if (__atomic_compare_exchange_n(&begun, &since, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		since = now;
	elapsed = now > since ? now - since : 1;
	if (elapsed > MEMORY_UNITS)
		elapsed = MEMORY_UNITS;
	bring_up_to_date(site, (uint32_t)now);
	bytes = __atomic_add_fetch(&site->bytes, found_bytes, __ATOMIC_RELAXED);

	/* As if a quarter of a sample more had lived: at a site without samples everything may live, at one where all of many died little. */
	live = (LOAD(site->lived) / elapsed + positive(LOAD(site->live))) / 2 + bytes / (1 + 4 * (LOAD(site->samples) / ONE_SAMPLE));
	large = positive(LOAD(live_bytes)) / LARGE_SITE_PART;
	if (large < usual_bytes)
		large = usual_bytes;
	if (live > large)
		live = large;
	if (live == 0)
		live = 1;

	/* As many samples as at the usual distance, in the long run. */
	adjust_scale(-(int64_t)(found_bytes < usual_bytes << limit ? SCALE_STEP * found_bytes / (usual_bytes << limit) : SCALE_STEP));
	/* The time is the same for all sites: R / L is as bytes to live bytes. What all lives has the usual distance, to begin with. */
	doublings = ((int32_t)(LOAD(scale) >> (SCALE_BITS - LOG_BITS)) + (int32_t)(SITE_FINER + limit) * (1 << LOG_BITS) +
		     (log2_of(bytes) - log2_of(live)) / 2 + (1 << (LOG_BITS - 1))) >>
		    LOG_BITS;
	if (doublings < (int32_t)limit)
		doublings = (int32_t)limit;
	if (doublings > (int32_t)(SITE_FINER + limit + SITE_COARSER))
		doublings = (int32_t)(SITE_FINER + limit + SITE_COARSER);
	return (uint32_t)doublings;
}

void site_kept(uint32_t number)
{
	if (LOAD(sites[number].samples) < UINT32_MAX / 2)
		__atomic_add_fetch(&sites[number].samples, ONE_SAMPLE, __ATOMIC_RELAXED);
	adjust_scale(SCALE_STEP);
}

static void change(uint32_t number, int64_t by_bytes, uint64_t now_ns)
{
	struct site *site = &sites[number];

	bring_up_to_date(site, (uint32_t)(now_ns >> UNIT_BITS));
	__atomic_add_fetch(&site->live, by_bytes, __ATOMIC_RELAXED);
	__atomic_add_fetch(&live_bytes, by_bytes, __ATOMIC_RELAXED);
}

void site_live(uint32_t number, uint64_t weight_bytes, uint64_t now_ns)
{
	change(number, (int64_t)weight_bytes, now_ns);
}

void site_dead(uint32_t number, uint64_t weight_bytes, uint64_t now_ns)
{
	change(number, -(int64_t)weight_bytes, now_ns);
}
