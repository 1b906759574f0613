/* System calls, without a libc: errno is not touched, no cancellation point is added. */
#ifndef FRAGPROF_SYSTEM_H
#define FRAGPROF_SYSTEM_H

#include "platform.h"

#ifdef __x86_64__
enum { CALL_CLOSE = 3, CALL_READ = 0, CALL_FSTAT = 5, CALL_MMAP = 9, CALL_MUNMAP = 11, CALL_SIGPROCMASK = 14, CALL_MADVISE = 28, CALL_GETPID = 39,
       CALL_GETTID = 186, CALL_FUTEX = 202, CALL_OPENAT = 257, CALL_MEMFD_CREATE = 319 };
#else
enum { CALL_CLOSE = 57, CALL_READ = 63, CALL_FSTAT = 80, CALL_MMAP = 222, CALL_MUNMAP = 215, CALL_SIGPROCMASK = 135, CALL_MADVISE = 233,
       CALL_GETPID = 172, CALL_GETTID = 178, CALL_FUTEX = 98, CALL_OPENAT = 56, CALL_MEMFD_CREATE = 279 };
#endif

/* The result, or minus the error number. */
static inline long system_call(long number, long a, long b, long c, long d, long e, long f)
{
#ifdef __x86_64__
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
#else
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#endif
}

/* <asm/mman.h>, <linux/futex.h>, <fcntl.h>: the same on both machines, except O_CLOEXEC's neighbours, which are not used. */
enum {
	MAP_SHARED_ = 1, MAP_PRIVATE_ = 2, MAP_ANONYMOUS_ = 0x20, PROT_READ_ = 1, PROT_WRITE_ = 2, MADV_WIPEONFORK_ = 18, MADV_DONTNEED_ = 4,
	MFD_CLOEXEC_ = 1, MFD_ALLOW_SEALING_ = 2,
	FUTEX_WAIT_ = 0, FUTEX_WAKE_ = 1, O_RDONLY_ = 0, O_RDWR_ = 2, O_CLOEXEC_ = 02000000, AT_FDCWD_ = -100, ERROR_MAX = 4095,
};

static inline bool failed(long result)
{
	return (unsigned long)result > -(unsigned long)ERROR_MAX - 1;
}

static inline void *map_memory(size_t bytes, int protection, int flags, int file)
{
	long result = system_call(CALL_MMAP, 0, (long)bytes, protection, flags, file, 0);

	return failed(result) ? NULL : (void *)result;
}

static inline int open_file(const char *path, int flags)
{
	return (int)system_call(CALL_OPENAT, AT_FDCWD_, (long)path, flags | O_CLOEXEC_, 0, 0, 0);
}

/* Sleeps as long as the word has this value, at most so long. Between processes. */
static inline void wait_on(uint32_t *word, uint32_t value, uint64_t most_ns)
{
	int64_t time[2] = { (int64_t)(most_ns / 1000000000u), (int64_t)(most_ns % 1000000000u) };

	system_call(CALL_FUTEX, (long)word, FUTEX_WAIT_, (long)value, (long)time, 0, 0);
}

static inline void wake(uint32_t *word)
{
	system_call(CALL_FUTEX, (long)word, FUTEX_WAKE_, 0x7fffffff, 0, 0, 0);
}

/* Whether the eight bytes there can be read. A system call that copies them and then refuses an argument: it is in every sandbox's list,
 * and changes nothing (Abseil's AddressIsReadable). `address` is a multiple of eight. */
static inline bool is_readable(uintptr_t address)
{
	return system_call(CALL_SIGPROCMASK, -1, (long)address, 0, 8, 0, 0) == -22; /* EINVAL: it got as far as the argument */
}

/* The machine's counter: runs at one rate on all CPUs. */
static inline uint64_t counter(void)
{
#ifdef __x86_64__
	uint32_t low, high;

	__asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
	return (uint64_t)high << 32 | low;
#else
	uint64_t value;

	__asm__ volatile("mrs %0, cntvct_el0" : "=r"(value));
	return value;
#endif
}

#endif
