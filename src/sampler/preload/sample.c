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

/* Maximum number of sample points of inner calls in one outer call. musl makes one call, wrappers one or two; after more, the outer call
 * must have been left by a jump. */
#define INNER_MAX 16

__thread struct thread sampler_thread;

EXPORT OWN_LINES struct fragprof_sampler_stats fragprof_sampler_stats = {
	.magic = 0x31535046,
	.size_bytes = sizeof(struct fragprof_sampler_stats),
	.sample_bytes = SAMPLE_BYTES_DEFAULT,
	.live_max = SET_LIVE_MAX,
	.samples_per_second = LIMIT_SAMPLES_PER_SECOND,
};
/* Each on a cache line of its own. */
static struct { struct debt debt; } __attribute__((aligned(64))) processors[DEBTS];
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

/* The interval of a countdown. */
static uint64_t interval(uint32_t doublings)
{
	return fragprof_sampler_stats.sample_bytes << doublings;
}

/* Number of doublings of the interval from now on. */
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
	while (interval(doublings) > SAMPLE_BYTES_MAX)
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

/* The sample points in the allocation that made the countdown negative, with the interval of that countdown, and the countdown to the
 * next. */
static uint64_t points(struct thread *thread, uint32_t *drawn_with)
{
	int64_t left = thread->left_bytes + thread->beyond_bytes;
	uint64_t found = 0;
	uint32_t doublings;

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
	*drawn_with = thread->doublings;
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
	doublings = doublings_now(thread, found > 0);
	if (doublings != thread->doublings) {
		/* The rest of the countdown is independent of the past, so it may be discarded. */
		thread->doublings = doublings;
		left = (int64_t)(draw(thread) - 1);
	}
	count_down(thread, left);
	return found;
}

RARE void sample(void *pointer, size_t size_bytes)
{
	struct thread *thread = &sampler_thread;
	uint64_t found, interval_bytes, weight;
	uint32_t doublings;

	if (thread->outer_sp != 0) {
		/* The outer call corrects the countdown. */
		if (sample_is_inner() && ++thread->inner_skipped <= INNER_MAX)
			return;
		thread->outer_sp = 0;
		thread->inner_skipped = 0;
	}
	found = points(thread, &doublings);
	if (found == 0)
		return;
	interval_bytes = interval(doublings);
	if (__builtin_mul_overflow(found, interval_bytes, &weight))
		weight = UINT64_MAX;
	count(&fragprof_sampler_stats.samples, 1);
	count(&fragprof_sampler_stats.weight_bytes, weight);
	if (doublings > 0)
		count_lengthened(interval_bytes);
	if (!listening_free()) {
		emit_alloc(pointer, size_bytes, weight, interval_bytes);
		return;
	}
	if (set_insert(pointer, (struct sampled){ size_bytes, doublings, weight })) {
		emit_alloc(pointer, size_bytes, weight, interval_bytes);
		return;
	}
	/* Without a slot its free would not be seen and the block would look live forever. This way allocated bytes stay correct, and live
	 * bytes are underestimated rather than overestimated. */
	count(&fragprof_sampler_stats.overflows, 1);
	count(&fragprof_sampler_stats.overflow_weight_bytes, weight);
	emit_alloc(pointer, size_bytes, weight, interval_bytes);
	emit_free(pointer);
}

bool sample_take(void *pointer, struct sampled *sampled)
{
	if (!set_remove(pointer, sampled))
		return false;
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
	count(&fragprof_sampler_stats.samples, 1);
	count(&fragprof_sampler_stats.weight_bytes, sampled.weight_bytes);
	bool kept = set_insert(pointer, sampled);
	emit_alloc(pointer, sampled.size_bytes, sampled.weight_bytes, interval(sampled.doublings));
	if (!kept) {
		count(&fragprof_sampler_stats.overflows, 1);
		count(&fragprof_sampler_stats.overflow_weight_bytes, sampled.weight_bytes);
		emit_free(pointer);
	}
}
