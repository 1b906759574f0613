/* Allocates and frees, with 64 live blocks at a time, of which the sampler samples two of three. Prints ten times how much is left behind:
 * the process's resident memory, and the library's own counts. Argument: the number of pairs. Begins on request. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As in src/sampler/preload/sample.h. */
struct stats {
	uint32_t magic, size_bytes;
	uint64_t sample_bytes, in_front, samples, weight_bytes, frees, overflows;
};
extern struct stats fragprof_sampler_stats __attribute__((weak));

#define LIVE 64
#define BYTES 512

static long resident_kib(void)
{
	char text[256] = { 0 };
	long all = 0, resident = 0;
	FILE *file = fopen("/proc/self/statm", "r");

	if (file == NULL || fgets(text, sizeof text, file) == NULL || sscanf(text, "%ld %ld", &all, &resident) != 2)
		return -1;
	fclose(file);
	return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

int main(int argc, char **argv)
{
	long pairs = argc > 1 ? atol(argv[1]) : 1000000;
	static void *blocks[LIVE];
	uint64_t state = 88172645463325252u;
	char command;

	puts("ready");
	fflush(stdout);
	if (read(0, &command, 1) != 1)
		return 1;
	for (int part = 0; part < 10; part++) {
		for (long i = 0; i < pairs / 10; i++) {
			state ^= state << 13;
			state ^= state >> 7;
			state ^= state << 17;
			void **block = &blocks[state % LIVE];

			free(*block);
			*block = malloc(BYTES - state % 64);
		}
		struct stats *stats = &fragprof_sampler_stats;
		printf("left %ld %lu %lu %lu\n", resident_kib(), (unsigned long)stats->samples, (unsigned long)stats->frees,
		       (unsigned long)stats->overflows);
		fflush(stdout);
	}
	return 0;
}
