/* Allocates in seccomp's strict mode, in which every system call but read, write and exit kills, and so does reading the time stamp
 * counter. The heap is made large enough before. */
#include <linux/seccomp.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	void *blocks[64];

	free(malloc(100000));
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
		return 2;
	for (int i = 0; i < 1000; i++) {
		for (int j = 0; j < 64; j++)
			blocks[j] = malloc(32);
		for (int j = 0; j < 64; j++)
			free(blocks[j]);
	}
	syscall(SYS_exit, 0);
	return 3;
}
