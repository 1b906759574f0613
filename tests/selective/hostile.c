/* A fake dynamic loader: it tries everything that a sandbox has to prevent. Its exit status is the number of attempts that succeeded; or it
 * does what WHAT selects. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

/* The arguments with which the finder calls a loader. */
void *_dl_allocate_tls(void *block)
{
	return block;
}

static long call(long n, long a, long b, long c, long d, long e)
{
	long result;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = 0;
	__asm__ volatile("syscall" : "=a"(result) : "a"(n), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
}

static long call32(long n, long a)
{
	long result;
	__asm__ volatile("int $0x80" : "=a"(result) : "a"(n), "b"(a) : "memory", "r8", "r9", "r10", "r11");
	return result;
}

static int try_all(void)
{
	int happened = 0;
	char bytes[64];
	struct rlimit more = { RLIM_INFINITY, RLIM_INFINITY };
	/* Files: outside, inside, and through other ways out. */
	happened += call(SYS_openat, AT_FDCWD, (long)"/etc/passwd", O_RDONLY, 0, 0) >= 0;
	happened += call(SYS_openat, AT_FDCWD, (long)"../../etc/passwd", O_RDONLY, 0, 0) >= 0;
	happened += call(SYS_openat, AT_FDCWD, (long)"/proc/self/mem", O_RDONLY, 0, 0) >= 0;
	happened += call(SYS_openat, AT_FDCWD, (long)"/new", O_CREAT | O_WRONLY, 0600, 0) >= 0;
	happened += call(SYS_openat, AT_FDCWD, (long)"/libc.so.6", O_RDWR, 0, 0) >= 0;
	happened += call(SYS_openat, AT_FDCWD, (long)"/", O_TMPFILE | O_RDWR, 0600, 0) >= 0;
	happened += call(SYS_unlink, (long)"/libc.so.6", 0, 0, 0, 0) >= 0;
	happened += call(SYS_mkdir, (long)"/folder", 0700, 0, 0, 0) >= 0;
	happened += call(SYS_chmod, (long)"/libc.so.6", 0777, 0, 0, 0) >= 0;
	/* Descriptors that were left open. */
	for (int fd = 3; fd < 1024; fd++)
		happened += call(SYS_read, fd, (long)bytes, 0, 0, 0) >= 0;
	/* Processes. */
	happened += call(SYS_fork, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_vfork, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_clone, CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD, 0, 0, 0, 0) >= 0;
	happened += call(SYS_clone3, (long)bytes, 0, 0, 0, 0) >= 0;
	happened += call(SYS_kill, -1, 0, 0, 0, 0) >= 0;
	happened += call(SYS_ptrace, 16, 1, 0, 0, 0) >= 0;
	happened += call(SYS_process_vm_readv, 1, (long)bytes, 0, 0, 0) >= 0;
	happened += call(SYS_pidfd_open, 1, 0, 0, 0, 0) >= 0;
	/* Privileges and namespaces. */
	happened += call(SYS_setuid, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_setgroups, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_unshare, CLONE_NEWUSER, 0, 0, 0, 0) >= 0;
	happened += call(SYS_chroot, (long)"/", 0, 0, 0, 0) >= 0;
	happened += call(SYS_mount, (long)"none", (long)"/", (long)"tmpfs", 0, 0) >= 0;
	happened += call(SYS_prctl, PR_SET_DUMPABLE, 0, 0, 0, 0) >= 0;
	happened += call(SYS_seccomp, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_setrlimit, RLIMIT_NPROC, (long)&more, 0, 0, 0) >= 0;
	happened += call(SYS_prlimit64, 0, RLIMIT_NPROC, (long)&more, 0, 0) >= 0;
	/* The kernel's larger surfaces. */
	happened += call(SYS_socket, 1, 1, 0, 0, 0) >= 0;
	happened += call(SYS_bpf, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_perf_event_open, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_io_uring_setup, 8, (long)bytes, 0, 0, 0) >= 0;
	happened += call(SYS_userfaultfd, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_memfd_create, (long)"x", 0, 0, 0, 0) >= 0;
	happened += call(SYS_keyctl, 0, 0, 0, 0, 0) >= 0;
	happened += call(SYS_shmget, 0, 4096, 01600, 0, 0) >= 0;
	return happened;
}

/* MiB that can be filled, up to 255. */
static int fill(void)
{
	int filled = 0;
	for (; filled < 255; filled++) {
		long at = call(SYS_mmap, 0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
		if (at < 0 && at > -4096)
			break;
		for (long byte = 0; byte < 1 << 20; byte += 4096)
			((volatile char *)at)[byte] = 1;
	}
	return filled;
}

__attribute__((force_align_arg_pointer)) void begin(void)
{
	long status = 0;
	(void)try_all;
	(void)fill;
	(void)call32;
#if WHAT == 0
	status = try_all();
#elif WHAT == 1
	status = fill();
#elif WHAT == 2
	char *none[] = { 0 };
	status = call(SYS_execve, (long)"/ld-linux-x86-64.so.2", (long)none, (long)none, 0, 0);
#elif WHAT == 3
	/* getpid of the 32-bit system calls, which have different numbers. */
	status = call32(20, 0);
#elif WHAT == 4
	for (;;)
		call(SYS_brk, 0, 0, 0, 0, 0);
#elif WHAT == 5
	/* Reports that it is ready, and then makes none of the requested calls. */
	for (;;)
		__asm__ volatile("int3; mov $0x1234, %%eax" ::: "rax");
#elif WHAT == 6
	*(volatile int *)0 = 0;
#endif
	call(SYS_exit_group, status, 0, 0, 0, 0);
}
