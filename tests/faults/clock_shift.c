/* Preloaded: shifts the wall clock by the number of seconds in the first 8 bytes of the file CLOCK_SHIFT. Other clocks are unchanged. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void map_shift(void)
{
	int fd = open(getenv("CLOCK_SHIFT"), O_RDONLY | O_CLOEXEC);
	void *at = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);

	if (fd < 0 || at == MAP_FAILED)
		abort();
	close(fd);
	shift = at;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
	int failed = syscall(SYS_clock_gettime, clock, now);

	if (!failed && clock == CLOCK_REALTIME && shift)
		now->tv_sec += *shift;
	return failed;
}
