/* The limit on the sample rate. See limit.h. */
#include "limit.h"

/* Two threads work on one debt only if one of them was moved in between: a second attempt is rare. After too many attempts a sample is not
 * added, which does no harm. */
#define ATTEMPTS_MAX 4

uint32_t limit_step(struct debt *debt, uint64_t now_ns, uint64_t each_ns, bool sampled)
{
	const uint64_t owed_max_ns = (uint64_t)LIMIT_BURST * (LIMIT_DOUBLINGS_MAX + 1) * each_ns - 1;
	uint64_t paid_ns = __atomic_load_n(&debt->paid_ns, __ATOMIC_RELAXED);
	uint64_t owed_ns = 0;

	for (int attempt = 0; attempt < ATTEMPTS_MAX; attempt++) {
		owed_ns = paid_ns > now_ns ? paid_ns - now_ns : 0;
		if (sampled)
			owed_ns += each_ns;
		/* Also if the clock went back, as in a process that was restored on another machine. */
		if (owed_ns > owed_max_ns)
			owed_ns = owed_max_ns;
		if (!sampled || __atomic_compare_exchange_n(&debt->paid_ns, &paid_ns, now_ns + owed_ns, false, __ATOMIC_RELAXED,
							    __ATOMIC_RELAXED))
			break;
	}
	return (uint32_t)(owed_ns / (LIMIT_BURST * each_ns));
}
