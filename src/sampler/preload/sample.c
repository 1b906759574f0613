/* Draws and reports the sampled allocations. See sample.h. No floating point, so that a program's rounding mode and flags do not matter. */
#include "sample.h"

#include "clock.h"
#include "next.h"

/* 2^64 * ln 2. */
#define LN2_Q64 0xb17217f7d1cf79abu
/* Bits of the logarithm's fraction. Its error is below 2^-26 of an interval. */
#define LOG2_FRACTION_BITS 32
/* Sample points in one allocation that are drawn individually; larger numbers are rounded randomly, which is also unbiased and faster. */
#define POINTS_DRAWN_MAX 32

/* A check follows after this part of an interval at the latest: at the limit there are 16 checks per sample, of about 40 ns each. It also
 * does not come before CHECK_BYTES_MIN, otherwise an interval of some bytes would be checked at every call. */
#define CHECKS_AN_INTERVAL 16
#define CHECK_BYTES_MIN SAMPLE_BYTES_DEFAULT
/* CPUs with a debt of their own; if there are more, several share one. 16 KiB, of which a page exists for each 64 in use. */
#define DEBTS 256u

/* Usual intervals below this are not divided by site: their candidates would be of some bytes. */
#define SAMPLE_BYTES_BY_SITE_MIN (16u << SITE_FINER)

/* Maximum number of sample points of inner calls in one outer call. musl makes one call, wrappers one or two; after more, the outer call
 * must have been left by a jump. */
#define INNER_MAX 16

#ifndef FRAGPROF_ATTACHED
__thread struct thread sampler_thread;
#endif

/* The library's first byte, and the end of its code (defined by the linker). */
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
extern const char etext[] __attribute__((visibility("hidden")));

EXPORT OWN_LINES struct fragprof_sampler_stats fragprof_sampler_stats = {
	.magic = 0x31535046,
	.size_bytes = sizeof(struct fragprof_sampler_stats),
	.sample_bytes = SAMPLE_BYTES_DEFAULT,
	.live_max = SET_LIVE_MAX,
	.samples_per_second = LIMIT_SAMPLES_PER_SECOND,
};
/* Each on a cache line of its own. */
static struct { struct debt debt; } __attribute__((aligned(64))) processors[DEBTS];
static uint64_t sample_bytes_by_site_min = SAMPLE_BYTES_BY_SITE_MIN;
static uint64_t process_seed OWN_LINES;
static uint64_t threads_seeded;

static void count(uint64_t *counter, uint64_t by)
{
	__atomic_add_fetch(counter, by, __ATOMIC_RELAXED);
}

/* A decimal number from `min` to `max`. */
static bool number(const char *text, uint64_t min, uint64_t max, uint64_t *number)
{
	uint64_t value = 0;

	if (text == NULL || *text == '\0')
		return false;
	for (; *text != '\0'; text++) {
		if (*text < '0' || *text > '9' || value > max)
			return false;
		value = value * 10 + (uint64_t)(*text - '0');
	}
	*number = value;
	return value >= min && value <= max;
}

static void count_lengthened(uint64_t interval_bytes)
{
	uint64_t longest = __atomic_load_n(&fragprof_sampler_stats.longest_sample_bytes, __ATOMIC_RELAXED);

	count(&fragprof_sampler_stats.lengthened, 1);
	while (interval_bytes > longest && !__atomic_compare_exchange_n(&fragprof_sampler_stats.longest_sample_bytes, &longest, interval_bytes,
								       true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		;
}

void sample_set_interval(const char *text)
{
	uint64_t value;

	if (!number(text, SAMPLE_BYTES_MIN, SAMPLE_BYTES_MAX, &value) || value == fragprof_sampler_stats.sample_bytes)
		return;
	fragprof_sampler_stats.sample_bytes = value;
	/* Constructors that ran before may have allocated: the current countdown was drawn for the usual interval, and would hide the
	 * program's first half megabyte from a shorter one. The draw is memoryless, so drawing again causes no bias. */
	sampler_thread.left_bytes = 0;
	sampler_thread.beyond_bytes = 0;
	sampler_thread.random = 0;
}

void sample_set_by_site(const char *text)
{
	uint64_t value;

	if (number(text, 0, 0, &value))
		sample_bytes_by_site_min = UINT64_MAX;
}

void sample_configure(uint64_t sample_bytes, uint64_t samples_per_second, bool is_by_site)
{
	if (sample_bytes >= SAMPLE_BYTES_MIN && sample_bytes <= SAMPLE_BYTES_MAX)
		fragprof_sampler_stats.sample_bytes = sample_bytes;
	if (samples_per_second <= LIMIT_SAMPLES_PER_SECOND_MAX)
		fragprof_sampler_stats.samples_per_second = samples_per_second;
	sample_bytes_by_site_min = is_by_site ? SAMPLE_BYTES_BY_SITE_MIN : UINT64_MAX;
}

void sample_set_limit(const char *text)
{
	uint64_t value;

	if (number(text, 0, LIMIT_SAMPLES_PER_SECOND_MAX, &value))
		fragprof_sampler_stats.samples_per_second = value;
}

void sample_set_seed(uint64_t seed)
{
	process_seed = seed;
}

/* The finaliser of splitmix64 (Steele, Lea, Flood 2014). */
static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
	return x ^ (x >> 31);
}

static uint64_t next_random(struct thread *thread)
{
	thread->random += 0x9e3779b97f4a7c15u;
	return mix(thread->random);
}

/* log2 of a number > 0, in units of 2^-32, by squaring: each squaring of a number in [1, 2) yields one bit of its logarithm. */
static uint64_t log2_q32(uint64_t x)
{
	int shift = __builtin_clzll(x);
	uint64_t mantissa = x << shift; /* [1, 2) in units of 2^-63 */
	uint64_t log = (uint64_t)(63 - shift) << LOG2_FRACTION_BITS;

	for (int bit = LOG2_FRACTION_BITS - 1; bit >= 0; bit--) {
		unsigned __int128 square = (unsigned __int128)mantissa * mantissa; /* [1, 4) in units of 2^-126 */

		if (square >> 127) {
			log |= 1ull << bit;
			mantissa = (uint64_t)(square >> 64);
		} else {
			mantissa = (uint64_t)(square >> 63);
		}
	}
	return log;
}

/* Whether call sites have intervals of their own. */
static bool is_by_site(void)
{
	return fragprof_sampler_stats.sample_bytes >= sample_bytes_by_site_min;
}

/* The interval of a countdown or a sample. */
static uint64_t interval(uint32_t doublings)
{
	return fragprof_sampler_stats.sample_bytes >> (is_by_site() ? SITE_FINER : 0) << doublings;
}

/* Doublings that the limit requires from now on: of the usual interval, and so of the finest. */
static uint32_t doublings_now(struct thread *thread, bool sampled)
{
	uint64_t now_ns, each_ns, limit = fragprof_sampler_stats.samples_per_second;
	uint32_t doublings, of_processor;

	/* An interval of 1 means every allocation. */
	if (limit == 0 || fragprof_sampler_stats.sample_bytes == 1 || !clock_now(&now_ns))
		return 0;
	each_ns = 1000000000u / limit;
	doublings = limit_step(&thread->debt, now_ns, each_ns, sampled);
	of_processor = limit_step(&processors[clock_processor() % DEBTS].debt, now_ns, each_ns, sampled);
	if (doublings < of_processor)
		doublings = of_processor;
	while (doublings > 0 && fragprof_sampler_stats.sample_bytes << doublings > SAMPLE_BYTES_MAX)
		doublings--;
	return doublings;
}

/* The distance to the next sample point, 1 or more, geometric with mean T: 1 + floor(-ln(u) * (T - 1/2)). The half makes up for
 * the rounding: 1 / (1 - exp(-1 / (T - 1/2))) = T up to 1 / (12 T). */
static uint64_t draw(struct thread *thread)
{
	if (fragprof_sampler_stats.sample_bytes == 1)
		return 1;

	uint64_t random = next_random(thread) | 1;
	uint64_t log = ((uint64_t)64 << LOG2_FRACTION_BITS) - log2_q32(random); /* -log2(u), at most 64 */
	uint64_t twice = 2 * interval(thread->doublings) - 1;			/* at most 2^41 */
	unsigned __int128 nepers = ((unsigned __int128)log * LN2_Q64) >> 32;	/* below 2^70, in units of 2^-64 */

	/* The product is 111 bits wide at most. */
	return 1 + (uint64_t)((nepers * twice) >> 65);
}

/* Counts down to a sample point that is so far away, or to the check before it. */
static void count_down(struct thread *thread, int64_t left_bytes)
{
	int64_t check_bytes = (int64_t)(interval(thread->doublings) / CHECKS_AN_INTERVAL);

	if (check_bytes < (int64_t)CHECK_BYTES_MIN)
		check_bytes = CHECK_BYTES_MIN;
	thread->beyond_bytes = left_bytes > check_bytes ? left_bytes - check_bytes : 0;
	thread->left_bytes = left_bytes - thread->beyond_bytes;
}

/* The sample points in the allocation that made the countdown negative, and the distance to the next. */
static uint64_t points(struct thread *thread, int64_t *left_bytes)
{
	int64_t left = thread->left_bytes + thread->beyond_bytes;
	uint64_t found = 0;

	thread->run_out++;
	if (thread->random == 0) {
		/* The thread's first allocation: the countdown started at no point. */
		/* Constructors of other libraries may allocate before ours runs. */
		next_read_settings();
		uint64_t nth = __atomic_add_fetch(&threads_seeded, 1, __ATOMIC_RELAXED);

		thread->random = mix(process_seed ^ mix((uintptr_t)thread) ^ (nth << 32)) | 1;
		thread->doublings = doublings_now(thread, false);
		left += (int64_t)(draw(thread) - 1);
	}
	while (left < 0 && found < POINTS_DRAWN_MAX) {
		found++;
		left += (int64_t)draw(thread);
	}
	if (left < 0) {
		uint64_t interval_bytes = interval(thread->doublings);
		/* left is -1 at a point with no byte of the allocation behind it. */
		uint64_t rest = (uint64_t)-left - 1;

		found += 1 + rest / interval_bytes + (next_random(thread) % interval_bytes < rest % interval_bytes);
		left = (int64_t)(draw(thread) - 1);
	}
	*left_bytes = left;
	return found;
}

/* How many of the points that were found at a site are kept, and the doublings with which they count: on average as many bytes. */
static uint64_t thinned(struct thread *thread, uint32_t site, uint64_t found, uint32_t *doublings)
{
	uint32_t usual = thread->doublings + SITE_FINER, by;
	uint64_t now_ns;

	*doublings = thread->doublings;
	if (!is_by_site())
		return found;
	*doublings = usual;
	if (clock_now(&now_ns))
		*doublings = site_doublings(site, found * interval(thread->doublings), thread->doublings,
					    fragprof_sampler_stats.sample_bytes, now_ns);
	/* Finer intervals would fill the set of live samples. */
	if (*doublings < usual && set_live() > SET_LIVE_MAX / 2)
		*doublings = usual;
	by = *doublings - thread->doublings;
	if (found >> by > 0) {
		/* It would be kept in any case, and all of its points cost no more than one. */
		*doublings = thread->doublings;
		site_kept(site);
		return found;
	}
	if ((next_random(thread) & ((1ull << by) - 1)) >= found)
		return 0;
	site_kept(site);
	return 1;
}

/* The next countdown, after a sample or a check. */
static void go_on(struct thread *thread, int64_t left_bytes, bool sampled)
{
	uint32_t doublings = doublings_now(thread, sampled);

	if (doublings != thread->doublings) {
		/* The rest of the countdown is independent of the past, so it may be discarded. */
		thread->doublings = doublings;
		left_bytes = (int64_t)(draw(thread) - 1);
	}
	count_down(thread, left_bytes);
}

/* Who called: a call of malloc from here is one of operator new. */
static const void *outside(const struct thread *thread, const void *caller)
{
	return (const char *)caller >= __ehdr_start && (const char *)caller < etext ? thread->caller_of_new : caller;
}

static void weigh(const struct sampled *sampled, uint64_t *weight_bytes, uint64_t *interval_bytes)
{
	*interval_bytes = interval((uint32_t)sampled->doublings);
	if (__builtin_mul_overflow((uint64_t)sampled->points, *interval_bytes, weight_bytes))
		*weight_bytes = UINT64_MAX;
}

/* The site's live bytes change by a sample. */
static void account(const struct sampled *sampled, void (*change)(uint32_t site, uint64_t weight_bytes, uint64_t now_ns))
{
	uint64_t now_ns, weight_bytes, interval_bytes;

	weigh(sampled, &weight_bytes, &interval_bytes);
	if (clock_now(&now_ns))
		change((uint32_t)sampled->site, weight_bytes, now_ns);
}

/* Reports a block. Without a slot in the set its free would not be seen, and the block would look live forever: then its free is reported at
 * once. This way allocated bytes stay correct, and live bytes are underestimated rather than overestimated. */
static void report(void *pointer, struct sampled sampled)
{
	uint64_t weight_bytes, interval_bytes;
	struct sampled stale;

	weigh(&sampled, &weight_bytes, &interval_bytes);
	count(&fragprof_sampler_stats.samples, 1);
	count(&fragprof_sampler_stats.weight_bytes, weight_bytes);
	if (!listening_free()) {
		emit_alloc(pointer, sampled.size_bytes, weight_bytes, interval_bytes);
		return;
	}
	/* A block that was freed without a consumer is still in the set; its address now has a new block. */
	if (set_may_hold(pointer) && set_remove(pointer, &stale))
		account(&stale, site_dead);
	bool kept = set_insert(pointer, sampled);
	if (kept)
		account(&sampled, site_live);
	emit_alloc(pointer, sampled.size_bytes, weight_bytes, interval_bytes);
	if (!kept) {
		count(&fragprof_sampler_stats.overflows, 1);
		count(&fragprof_sampler_stats.overflow_weight_bytes, weight_bytes);
		emit_free(pointer);
	}
}

RARE void sample(void *pointer, size_t size_bytes, const void *caller)
{
	struct thread *thread = &sampler_thread;
	struct sampled sampled = { .size_bytes = size_bytes };
	uint64_t found;
	uint32_t doublings;
	int64_t left_bytes;

	if (thread->outer_sp != 0) {
		/* The outer call corrects the countdown. */
		if (sample_is_inner() && ++thread->inner_skipped <= INNER_MAX)
			return;
		thread->outer_sp = 0;
		thread->inner_skipped = 0;
	}
	found = points(thread, &left_bytes);
	if (found > 0) {
		sampled.site = site_of(outside(thread, caller), size_bytes);
		found = thinned(thread, (uint32_t)sampled.site, found, &doublings);
		sampled.doublings = doublings;
		sampled.points = found;
	}
	if (found > 0 && thread->doublings > 0)
		count_lengthened(interval((uint32_t)sampled.doublings));
	go_on(thread, left_bytes, found > 0);
	if (found > 0)
		report(pointer, sampled);
}

bool sample_take(void *pointer, struct sampled *sampled)
{
	if (!set_remove(pointer, sampled))
		return false;
	account(sampled, site_dead);
	count(&fragprof_sampler_stats.frees, 1);
	emit_free(pointer);
	return true;
}

RARE void sample_free(void *pointer)
{
	struct sampled sampled;

	sample_take(pointer, &sampled);
}

RARE void sample_put_back(void *pointer, struct sampled sampled)
{
	report(pointer, sampled);
}
