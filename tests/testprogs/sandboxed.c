/* A process that may make hardly any system call under a seccomp filter that kills it: a probe must not cause any other call. */
#include "truth.h"
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define ALLOW(call)                                                                                                               \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

SITE struct block site_sandboxed(size_t n) { void *p = malloc(n); return TOOK(p, n); }

int main(void)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		ALLOW(read), ALLOW(write), ALLOW(brk), ALLOW(mmap), ALLOW(munmap), ALLOW(mprotect), ALLOW(exit_group), ALLOW(getpid), ALLOW(rt_sigreturn),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };

	truth_connect();
	/* The allocator requests random bytes when it is first used. */
	free(malloc(1));
	REQUIRE(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
	REQUIRE(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
	truth_rendezvous("ready");
	for (size_t i = 0; i < 3000; i++) {
		struct block b = site_sandboxed(24 + i % 700);
		if (i % 5)
			block_free(b);
	}
	truth_rendezvous("done");
	return 0;
}
