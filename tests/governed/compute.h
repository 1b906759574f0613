/* Work of a program in addition to its allocations: a budget is a share of a program's own CPU time. */
#include <time.h>

/* Takes this much CPU time. */
static void compute(long us)
{
	struct timespec begin, now;

	if (!us)
		return;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
	do
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	while ((now.tv_sec - begin.tv_sec) * 1000000000L + now.tv_nsec - begin.tv_nsec < us * 1000);
}
