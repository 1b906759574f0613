/* Allocates in seccomp's strict mode, in which every system call except read, write and exit kills the process, and so does reading the
 * time stamp counter. The heap is made large enough before. With "wait" it begins on request, and fails if the sampler's interval did not
 * grow meanwhile. */
#include <stdint.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* <linux/seccomp.h>, which musl does not have. */
#define SECCOMP_MODE_STRICT 1

/* As in src/sampler/preload/sample.h. */
struct stats {
	uint32_t magic, size_bytes;
	uint64_t sample_bytes, in_front, samples, weight_bytes, frees, overflows, overflow_weight_bytes, live_max, samples_per_second;
	uint64_t lengthened, longest_sample_bytes;
};
extern struct stats fragprof_sampler_stats __attribute__((weak));

int main(int argc, char **argv)
{
	void *blocks[64];
	char command;

	(void)argv;
	free(malloc(100000));
	if (argc > 1 && (write(1, "ready\n", 6) != 6 || read(0, &command, 1) != 1))
		return 1;
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
		return 2;
	for (int i = 0; i < 1000; i++) {
		for (int j = 0; j < 64; j++)
			blocks[j] = malloc(32);
		for (int j = 0; j < 64; j++)
			free(blocks[j]);
	}
	syscall(SYS_exit, argc > 1 && fragprof_sampler_stats.lengthened == 0 ? 4 : 0);
	return 3;
}
