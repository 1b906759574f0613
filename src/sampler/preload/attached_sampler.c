/* An attached library that samples. See attach.h. */
#include "attach.h"

#include "sample.h"

/* Mean distance of samples in bytes, samples per second, whether call sites have distances of their own. They count for the first pass. */
enum attached_refusal attached_begin(const uint64_t arguments[3], bool is_first)
{
	if (is_first)
		sample_configure(arguments[0], arguments[1], arguments[2] != 0);
	return ATTACHED_NOT_REFUSED;
}

void attached_in_front(bool in_front)
{
	fragprof_sampler_stats.in_front = in_front;
}
