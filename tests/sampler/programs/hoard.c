/* Keeps this many blocks, prints the sampler's own statistics and the memory that its data takes, then frees all blocks. */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern struct {
	uint32_t magic, size_bytes;
	uint64_t sample_bytes, in_front, samples, weight_bytes, frees, overflows, overflow_weight_bytes, live_max;
} fragprof_sampler_stats __attribute__((weak));

/* Resident KiB of the library's mappings and of the anonymous one after them, which is its .bss. */
static long resident_kib(void)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	char line[4096];
	long sum = 0, kib;
	int ours = 0, before = 0;

	while (fgets(line, sizeof line, smaps)) {
		if (sscanf(line, "Rss: %ld kB", &kib) == 1) {
			if (ours)
				sum += kib;
		} else if (line[0] >= '0' && line[0] <= 'f' && strchr(line, '-') && strstr(line, " ")) {
			if (strchr(line, ':') && strchr(line, '-') < strchr(line, ' ')) {
				int named = strstr(line, "libfragprof_sampler") != NULL;
				ours = named || (before && !strchr(line, '/') && !strchr(line, '['));
				before = named;
			}
		}
	}
	fclose(smaps);
	return sum;
}

int main(int argc, char **argv)
{
	size_t count = argc > 1 ? (size_t)atol(argv[1]) : 1000;
	void **blocks = malloc(count * sizeof *blocks);

	for (size_t i = 0; i < count; i++)
		blocks[i] = malloc(40);
	printf("in_front %" PRIu64 "\noverflows %" PRIu64 "\nlive_max %" PRIu64 "\nresident_kib %ld\n", fragprof_sampler_stats.in_front,
	       fragprof_sampler_stats.overflows,
	       fragprof_sampler_stats.live_max, resident_kib());
	for (size_t i = 0; i < count; i++)
		free(blocks[i]);
	free(blocks);
	puts("ok");
	return 0;
}
