/* Which allocations are sampled, and telling of them. See sample.h. No floating point: a program's rounding mode and exception flags
 * are its own. */
#include "sample.h"

#include "next.h"

/* 2^64 * ln 2. */
#define LN2_Q64 0xb17217f7d1cf79abu
/* Bits of the logarithm's fraction. Its error is below 2^-26 of an interval. */
#define LOG2_FRACTION_BITS 32
/* Sample points in one allocation that are drawn one by one; what is larger is rounded at random, which is as unbiased and faster. */
#define POINTS_DRAWN_MAX 32

/* Sample points of inner calls in one outer call. musl makes one call, wrappers one or two; after more, the outer call must have been
 * left by a jump. */
#define INNER_MAX 16

__thread struct thread sampler_thread;

EXPORT OWN_LINES struct fragprof_sampler_stats fragprof_sampler_stats = {
	.magic = 0x31535046,
	.size_bytes = sizeof(struct fragprof_sampler_stats),
	.sample_bytes = SAMPLE_BYTES_DEFAULT,
	.live_max = SET_LIVE_MAX,
};
static uint64_t process_seed OWN_LINES;
static uint64_t threads_seeded;

static void count(uint64_t *counter, uint64_t by)
{
	__atomic_add_fetch(counter, by, __ATOMIC_RELAXED);
}

void sample_set_interval(const char *text)
{
	uint64_t value = 0;

	if (text == NULL || *text == '\0')
		return;
	for (; *text != '\0'; text++) {
		if (*text < '0' || *text > '9' || value > SAMPLE_BYTES_MAX)
			return;
		value = value * 10 + (uint64_t)(*text - '0');
	}
	if (value < SAMPLE_BYTES_MIN || value > SAMPLE_BYTES_MAX || value == fragprof_sampler_stats.sample_bytes)
		return;
	fragprof_sampler_stats.sample_bytes = value;
	/* Constructors that ran before may have allocated: the countdown under way was drawn for the usual interval, and would hide the
	 * program's first half megabyte from a finer one. It has no memory, so drawing it anew biases nothing. */
	sampler_thread.left_bytes = 0;
	sampler_thread.random = 0;
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

/* The distance to the next sample point, 1 or more, geometric with mean T: 1 + floor(-ln(u) * (T - 1/2)). The half makes up for
 * the rounding: 1 / (1 - exp(-1 / (T - 1/2))) = T up to 1 / (12 T). */
static uint64_t draw(struct thread *thread)
{
	if (fragprof_sampler_stats.sample_bytes == 1)
		return 1;

	uint64_t random = next_random(thread) | 1;
	uint64_t log = ((uint64_t)64 << LOG2_FRACTION_BITS) - log2_q32(random); /* -log2(u), at most 64 */
	uint64_t twice = 2 * fragprof_sampler_stats.sample_bytes - 1;		/* at most 2^41 */
	unsigned __int128 nepers = ((unsigned __int128)log * LN2_Q64) >> 32;	/* below 2^70, in units of 2^-64 */

	/* The product is 111 bits wide at most. */
	return 1 + (uint64_t)((nepers * twice) >> 65);
}

/* The sample points in the allocation that made the countdown negative, and the countdown to the next. */
static uint64_t points(struct thread *thread)
{
	int64_t left = thread->left_bytes;
	uint64_t found = 0;

	thread->run_out++;
	if (thread->random == 0) {
		/* The thread's first allocation: the countdown started at no point. */
		/* Constructors of other libraries may allocate before ours runs. */
		next_read_interval();
		uint64_t nth = __atomic_add_fetch(&threads_seeded, 1, __ATOMIC_RELAXED);

		thread->random = mix(process_seed ^ mix((uintptr_t)thread) ^ (nth << 32)) | 1;
		left += (int64_t)(draw(thread) - 1);
	}
	while (left < 0 && found < POINTS_DRAWN_MAX) {
		found++;
		left += (int64_t)draw(thread);
	}
	if (left < 0) {
		uint64_t interval = fragprof_sampler_stats.sample_bytes;
		/* left is -1 at a point with no byte of the allocation behind it. */
		uint64_t rest = (uint64_t)-left - 1;

		found += 1 + rest / interval + (next_random(thread) % interval < rest % interval);
		left = (int64_t)(draw(thread) - 1);
	}
	thread->left_bytes = left;
	return found;
}

RARE void sample(void *pointer, size_t size_bytes)
{
	struct thread *thread = &sampler_thread;
	uint64_t found, weight;

	if (thread->outer_sp != 0) {
		/* The outer call puts the countdown right. */
		if (sample_is_inner() && ++thread->inner_skipped <= INNER_MAX)
			return;
		thread->outer_sp = 0;
		thread->inner_skipped = 0;
	}
	found = points(thread);
	if (found == 0)
		return;
	if (__builtin_mul_overflow(found, fragprof_sampler_stats.sample_bytes, &weight))
		weight = UINT64_MAX;
	count(&fragprof_sampler_stats.samples, 1);
	count(&fragprof_sampler_stats.weight_bytes, weight);
	if (!listening_free()) {
		emit_alloc(pointer, size_bytes, weight);
		return;
	}
	if (set_insert(pointer, (struct sampled){ size_bytes, weight })) {
		emit_alloc(pointer, size_bytes, weight);
		return;
	}
	/* Without a place its free would go unseen and the block would look live for ever. What was allocated stays right, and of what
	 * lives too little is known rather than too much. */
	count(&fragprof_sampler_stats.overflows, 1);
	count(&fragprof_sampler_stats.overflow_weight_bytes, weight);
	emit_alloc(pointer, size_bytes, weight);
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
	emit_alloc(pointer, sampled.size_bytes, sampled.weight_bytes);
	if (!kept) {
		count(&fragprof_sampler_stats.overflows, 1);
		count(&fragprof_sampler_stats.overflow_weight_bytes, sampled.weight_bytes);
		emit_free(pointer);
	}
}
