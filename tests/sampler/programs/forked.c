/* Allocates, forks, and prints in each process whether allocations are counted, according to the library's own statistics. The child
 * prints it again after the next byte of input. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

extern struct {
	uint32_t magic, size_bytes;
	uint64_t sample_bytes, in_front, samples;
} fragprof_sampler_stats __attribute__((weak));

static int counts(void)
{
	for (int i = 0; i < 100; i++)
		free(malloc(100));
	uint64_t before = fragprof_sampler_stats.samples;
	for (int i = 0; i < 100; i++)
		free(malloc(100));
	return fragprof_sampler_stats.samples > before;
}

int main(void)
{
	char byte;

	if (read(0, &byte, 1) != 1)
		return 1;
	dprintf(1, "parent counts %d\n", counts());
	pid_t child = fork();
	if (child == 0) {
		dprintf(1, "child counts %d\n", counts());
		if (read(0, &byte, 1) != 1)
			_exit(1);
		dprintf(1, "child then counts %d\n", counts());
		_exit(0);
	}
	int status;
	return waitpid(child, &status, 0) != child || status;
}
