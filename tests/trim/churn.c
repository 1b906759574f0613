/*
 * A process that checks itself: workers that allocate and compare every block with what they wrote, threads that wait in each kind of
 * system call and check what it returns and for how long it waited, a thread that checks that all of its registers, its red zone, its
 * signal mask and its alternate stack survive a system call, and a timer of one millisecond. Anything wrong ends it by abort(). It runs
 * until its standard input ends, and then prints what it counted as one line of JSON.
 *
 * Arguments: number of workers, whether there is a timer (0 or 1), microseconds that a worker pauses between rounds; the kinds of waiting
 * threads ("" = all); MiB that a peak allocated before, of which an eighth stays.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define WRONG(...) do { fprintf(stderr, "WRONG: " __VA_ARGS__); fputc('\n', stderr); abort(); } while (0)

enum { SLOTS = 4096, LAST = -1 };

static atomic_int ending;
static atomic_ulong rounds, wakes, reads, register_checks, suspends, timer_signals;
static atomic_ulong sleep_eintr, epoll_eintr, poll_eintr, semaphore_eintr;
static atomic_ulong longest_malloc_ns;
static unsigned pause_us;

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void *timed_malloc(size_t bytes)
{
	uint64_t begun = now_ns();
	void *block = malloc(bytes);
	uint64_t took = now_ns() - begun;
	unsigned long longest = longest_malloc_ns;
	while (took > longest && !atomic_compare_exchange_weak(&longest_malloc_ns, &longest, took))
		;
	return block;
}

static void *work(void *seed)
{
	uint64_t x = (uintptr_t)seed * 0x9e3779b97f4a7c15u | 1;
	struct { unsigned char *at; uint32_t bytes; unsigned char fill; } *slots = calloc(SLOTS, sizeof *slots);
	while (!ending) {
		for (int k = 0; k < 256; k++) {
			x ^= x << 13, x ^= x >> 7, x ^= x << 17;
			int i = x % SLOTS;
			if (slots[i].at) {
				for (uint32_t j = 0; j < slots[i].bytes; j += 61)
					if (slots[i].at[j] != slots[i].fill)
						WRONG("byte %u of %u at %p", j, slots[i].bytes, (void *)slots[i].at);
				if ((x >> 40 & 1) && slots[i].bytes > 64) {
					slots[i].bytes = slots[i].bytes / 2 + 1;
					slots[i].at = realloc(slots[i].at, slots[i].bytes);
					continue;
				}
				free(slots[i].at);
				slots[i].at = NULL;
			} else {
				uint32_t bytes = (x >> 20) % 1000 == 0 ? 100000 : (x >> 20) % 100 == 1 ? 20000 : 16 + (x >> 30) % 1500;
				slots[i].at = k % 16 ? malloc(bytes) : timed_malloc(bytes);
				slots[i].bytes = bytes;
				slots[i].fill = x >> 50;
				memset(slots[i].at, slots[i].fill, bytes);
			}
		}
		rounds++;
		if (pause_us)
			usleep(pause_us);
	}
	return NULL;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static unsigned long turn;
static int read_pipe[2], quiet_pipe[2], register_pipe[2];
static sem_t semaphore;

static void *wait_on_condition(void *unused)
{
	(void)unused;
	unsigned long seen = 0;
	pthread_mutex_lock(&mutex);
	while (!ending) {
		while (turn == seen && !ending)
			pthread_cond_wait(&condition, &mutex);
		seen = turn;
		wakes++;
	}
	pthread_mutex_unlock(&mutex);
	return NULL;
}

static void *wait_in_read(void *unused)
{
	(void)unused;
	for (int32_t expected = 0;; expected++) {
		int32_t number;
		ssize_t n = read(read_pipe[0], &number, 4);
		if (n != 4)
			WRONG("read: %zd %s", n, strerror(errno));
		if (number == LAST)
			return NULL;
		if (number != expected)
			WRONG("read %d where %d was next: a call was lost or made twice", number, expected);
		reads++;
	}
}

static void *sleep_for(void *unused)
{
	(void)unused;
	while (!ending) {
		struct timespec wanted = { 0, 20000000 }, left = { 9, 9 };
		uint64_t begun = now_ns();
		int error = clock_nanosleep(CLOCK_MONOTONIC, 0, &wanted, &left);
		uint64_t slept = now_ns() - begun;
		if (error == EINTR)
			sleep_eintr++;
		else if (error || slept < 19900000)
			WRONG("sleep: error %d after %lu ns", error, slept);
	}
	return NULL;
}

static void *wait_in_epoll(void *unused)
{
	(void)unused;
	int epoll = epoll_create1(0);
	struct epoll_event wanted = { .events = EPOLLIN };
	epoll_ctl(epoll, EPOLL_CTL_ADD, quiet_pipe[0], &wanted);
	while (!ending) {
		struct epoll_event event;
		if (epoll_wait(epoll, &event, 1, 50) < 0) {
			if (errno != EINTR)
				WRONG("epoll_wait: %s", strerror(errno));
			epoll_eintr++;
		}
	}
	return NULL;
}

static void *wait_in_poll(void *unused)
{
	(void)unused;
	while (!ending) {
		struct pollfd wanted = { quiet_pipe[0], POLLIN, 0 };
		uint64_t begun = now_ns();
		if (poll(&wanted, 1, 20) < 0) {
			if (errno != EINTR)
				WRONG("poll: %s", strerror(errno));
			poll_eintr++;
		} else if (now_ns() - begun < 19500000) {
			WRONG("poll ended early");
		}
	}
	return NULL;
}

static void *wait_for_semaphore(void *unused)
{
	(void)unused;
	while (!ending) {
		struct timespec until;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 20000000;
		if (until.tv_nsec >= 1000000000)
			until.tv_nsec -= 1000000000, until.tv_sec++;
		uint64_t begun = now_ns();
		if (!sem_timedwait(&semaphore, &until))
			WRONG("the semaphore was posted by nobody");
		if (errno == EINTR)
			semaphore_eintr++;
		else if (errno != ETIMEDOUT || now_ns() - begun < 19500000)
			WRONG("sem_timedwait: %s", strerror(errno));
	}
	return NULL;
}

static volatile sig_atomic_t is_signalled;

/* Allocates: allowed, because the signal is open in sigsuspend alone. */
static void on_signal(int signal)
{
	(void)signal;
	free(malloc(100));
	is_signalled = 1;
}

static void *wait_in_sigsuspend(void *unused)
{
	(void)unused;
	sigset_t all, open;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, NULL);
	sigfillset(&open);
	sigdelset(&open, SIGUSR1);
	while (!ending) {
		is_signalled = 0;
		if (sigsuspend(&open) != -1 || errno != EINTR || !is_signalled)
			WRONG("sigsuspend returned without its signal");
		suspends++;
	}
	return NULL;
}

static void on_timer(int signal)
{
	(void)signal;
	timer_signals++;
	volatile char frame[64];
	memset((char *)frame, 1, sizeof frame);
}

/* A raw read with every register filled; 32 vector registers of 512 bits where the machine has them. */
#define VECTORS 32
static _Alignas(64) uint64_t before[VECTORS * 8], after[VECTORS * 8];
#define ALL(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15) f(16) f(17) f(18) f(19) f(20) f(21) f(22) \
	f(23) f(24) f(25) f(26) f(27) f(28) f(29) f(30) f(31)

#ifdef __x86_64__
__attribute__((noinline, target("avx512f"))) static long read_in_512(int fd, void *to)
{
	register uint64_t *in __asm__("r12") = before, *out __asm__("r13") = after;
	long result;
#define LOAD(n) "vmovdqu64 64*" #n "(%%r12),%%zmm" #n ";"
#define STORE(n) "vmovdqu64 %%zmm" #n ",64*" #n "(%%r13);"
	__asm__ volatile(ALL(LOAD)
		"movq $0x5a5a,-8(%%rsp);movq $0x6b6b,-120(%%rsp);movq $77,%%r14;movq $88,%%r15;movq $99,%%r8;movq $98,%%r9;movq $97,%%r10;"
		"movw $0x1234,%%bx;kmovw %%ebx,%%k1;stc;syscall;jnc 9f;"
		"cmpq $0x5a5a,-8(%%rsp);jne 9f;cmpq $0x6b6b,-120(%%rsp);jne 9f;cmpq $77,%%r14;jne 9f;cmpq $88,%%r15;jne 9f;"
		"cmpq $99,%%r8;jne 9f;cmpq $98,%%r9;jne 9f;cmpq $97,%%r10;jne 9f;kmovw %%k1,%%ebx;cmpw $0x1234,%%bx;jne 9f;jmp 8f;9: ud2;8:"
		ALL(STORE)
		: "=a"(result)
		: "a"(0L), "D"((long)fd), "S"(to), "d"(4L), "r"(in), "r"(out)
		: "rbx", "rcx", "r8", "r9", "r10", "r11", "r14", "r15", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7",
		  "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21",
		  "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31", "k1");
	return result;
}

__attribute__((noinline)) static long read_in_128(int fd, void *to)
{
	register uint64_t *in __asm__("r12") = before, *out __asm__("r13") = after;
	long result;
#define LOAD_128(n) "movdqu 64*" #n "(%%r12),%%xmm" #n ";"
#define STORE_128(n) "movdqu %%xmm" #n ",64*" #n "(%%r13);"
#define ALL_128(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15)
	__asm__ volatile(ALL_128(LOAD_128) "movq $0x5a5a,-8(%%rsp);movq $0x6b6b,-120(%%rsp);syscall;"
		"cmpq $0x5a5a,-8(%%rsp);jne 9f;cmpq $0x6b6b,-120(%%rsp);jne 9f;jmp 8f;9: ud2;8:" ALL_128(STORE_128)
		: "=a"(result)
		: "a"(0L), "D"((long)fd), "S"(to), "d"(4L), "r"(in), "r"(out)
		: "rcx", "r11", "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11",
		  "xmm12", "xmm13", "xmm14", "xmm15");
	return result;
}

/* Bits of a vector register that a system call preserves. */
static int vector_bits(void)
{
	return __builtin_cpu_supports("avx512f") ? 512 : 128;
}

static int vector_count(void)
{
	return __builtin_cpu_supports("avx512f") ? 32 : 16;
}

static long read_with_full_registers(int fd, void *to)
{
	return vector_bits() == 512 ? read_in_512(fd, to) : read_in_128(fd, to);
}

static uint64_t arithmetic_control(void)
{
	return _mm_getcsr();
}
#else
static int vector_bits(void)
{
	return 128;
}

static int vector_count(void)
{
	return 32;
}

/* A system call preserves all general registers but x0, and the flags. */
__attribute__((noinline)) static long read_with_full_registers(int fd, void *to)
{
	register long result __asm__("x0") = fd;
	register void *buffer __asm__("x1") = to;
	register long bytes __asm__("x2") = 4, call __asm__("x8") = SYS_read;
	register uint64_t *in __asm__("x19") = before, *out __asm__("x20") = after;
#define LOAD(n) "ldr q" #n ",[x19,#64*" #n "];"
#define STORE(n) "str q" #n ",[x20,#64*" #n "];"
#define KEPT(f) f(3) f(4) f(5) f(6) f(7) f(9) f(10) f(11) f(12) f(13) f(14) f(15) f(16) f(17) f(21) f(22) f(23)
#define SET(n) "mov x" #n ",#77+" #n ";"
#define CHECK(n) "cmp x" #n ",#77+" #n ";b.ne 9f;"
	__asm__ volatile(ALL(LOAD) KEPT(SET) "cmp xzr,xzr;svc #0;b.ne 9f;" KEPT(CHECK) "cmp x8,%[call];b.ne 9f;cmp x2,#4;b.ne 9f;b 8f;9: brk #1;8:"
		ALL(STORE)
		: "+r"(result)
		: "r"(buffer), "r"(bytes), "r"(call), "r"(in), "r"(out), [call] "I"(SYS_read)
		: "x3", "x4", "x5", "x6", "x7", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x21", "x22", "x23", "memory", "cc",
		  "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17", "v18", "v19",
		  "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31");
	return result;
}

static uint64_t arithmetic_control(void)
{
	uint64_t control;
	__asm__ volatile("mrs %0, fpcr" : "=r"(control));
	return control;
}
#endif

static void *check_registers(void *unused)
{
	(void)unused;
	int words = vector_bits() / 64, vectors = vector_count();
	static char alternate[32768];
	stack_t stack = { .ss_sp = alternate, .ss_size = sizeof alternate }, stack_now;
	sigaltstack(&stack, NULL);
	sigset_t mask, mask_now;
	sigemptyset(&mask);
	sigaddset(&mask, SIGUSR1);
	sigaddset(&mask, SIGWINCH);
	pthread_sigmask(SIG_SETMASK, &mask, NULL);
	fesetround(FE_UPWARD);
	uint64_t control = arithmetic_control();
	for (uint64_t round = 0;; round++) {
		int32_t number = 0;
		for (int k = 0; k < VECTORS * 8; k++)
			before[k] = 0x1111111111111111ull * (k % 15 + 1) + round;
		memset(after, 0, sizeof after);
		long n = read_with_full_registers(register_pipe[0], &number);
		if (n != 4)
			WRONG("read with full registers: %ld", n);
		for (int k = 0; k < VECTORS * 8; k++)
			if (before[k] != after[k] && k % 8 < words && k / 8 < vectors)
				WRONG("word %d of the vector registers: %lx was %lx", k, after[k], before[k]);
		if (arithmetic_control() != control || fegetround() != FE_UPWARD)
			WRONG("floating point control changed");
		pthread_sigmask(SIG_SETMASK, NULL, &mask_now);
		for (int signal = 1; signal < 65; signal++)
			if (sigismember(&mask_now, signal) != sigismember(&mask, signal) && signal != 32 && signal != 33)
				WRONG("signal %d of the mask changed", signal);
		sigaltstack(NULL, &stack_now);
		if (stack_now.ss_sp != alternate || stack_now.ss_flags || stack_now.ss_size != sizeof alternate)
			WRONG("the alternate stack changed");
		register_checks++;
		if (number == LAST)
			return NULL;
	}
}

static atomic_int is_over;
static void *wait_for_the_end(void *unused)
{
	char c;
	while (read(0, &c, 1) > 0)
		;
	is_over = 1;
	return unused;
}

/* What a peak of the load leaves: free memory, and an eighth of the blocks. */
static void leave_peak(size_t bytes)
{
	enum { BLOCK = 9000 };
	size_t count = bytes / BLOCK;
	char **blocks = malloc((count + 1) * sizeof *blocks);

	for (size_t i = 0; i < count; i++) {
		blocks[i] = malloc(BLOCK);
		memset(blocks[i], 1, BLOCK);
	}
	for (size_t i = 0; i < count; i++)
		if (i % 8)
			free(blocks[i]);
}

int main(int argc, char **argv)
{
	int workers = argc > 1 ? atoi(argv[1]) : 2, timer = argc > 2 ? atoi(argv[2]) : 1;
	pause_us = argc > 3 ? atoi(argv[3]) : 0;
	const char *kinds = argc > 4 ? argv[4] : "";
	leave_peak(argc > 5 ? strtoul(argv[5], NULL, 10) << 20 : 0);
	if (pipe(read_pipe) || pipe(quiet_pipe) || pipe(register_pipe) || sem_init(&semaphore, 0, 0))
		return 1;
	struct sigaction action = { .sa_handler = on_timer, .sa_flags = SA_RESTART };
	sigaction(SIGRTMIN + 3, &action, NULL);
	action = (struct sigaction){ .sa_handler = on_signal };
	sigaction(SIGUSR1, &action, NULL);
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &blocked, NULL);

	pthread_t threads[64], suspended = 0, last;
	int count = 0;
	for (int i = 0; i < workers; i++)
		pthread_create(&threads[count++], NULL, work, (void *)(long)(i + 1));
	struct { const char *name; void *(*run)(void *); } waiting[] = {
		{ "condition", wait_on_condition }, { "read", wait_in_read }, { "registers", check_registers }, { "sleep", sleep_for },
		{ "epoll", wait_in_epoll }, { "poll", wait_in_poll }, { "semaphore", wait_for_semaphore }, { "suspend", wait_in_sigsuspend },
	};
	for (size_t i = 0; i < sizeof waiting / sizeof *waiting; i++) {
		if (*kinds && !strstr(kinds, waiting[i].name))
			continue;
		pthread_create(&threads[count], NULL, waiting[i].run, NULL);
		pthread_setname_np(threads[count], waiting[i].name);
		if (waiting[i].run == wait_in_sigsuspend)
			suspended = threads[count];
		count++;
	}
	if (timer) {
		timer_t made;
		struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3 };
		struct itimerspec every = { { 0, 1000000 }, { 0, 1000000 } };
		timer_create(CLOCK_MONOTONIC, &event, &made);
		timer_settime(made, 0, &every, NULL);
	}
	pthread_create(&last, NULL, wait_for_the_end, NULL);
	if (write(1, "ready\n", 6) != 6)
		return 1;
	int has_read = !*kinds || strstr(kinds, "read"), has_registers = !*kinds || strstr(kinds, "registers");
	for (int32_t number = 0, i = 0; !is_over; i++) {
		struct timespec step = { 0, 5000000 };
		nanosleep(&step, NULL);
		pthread_mutex_lock(&mutex);
		turn++;
		pthread_cond_signal(&condition);
		pthread_mutex_unlock(&mutex);
		if (has_read && write(read_pipe[1], &number, 4) == 4)
			number++;
		int32_t zero = 0;
		if (has_registers && write(register_pipe[1], &zero, 4) != 4)
			return 1;
		if (suspended && i % 4 == 0)
			pthread_kill(suspended, SIGUSR1);
	}
	ending = 1;
	int32_t end = LAST;
	if (write(read_pipe[1], &end, 4) != 4 || write(register_pipe[1], &end, 4) != 4)
		return 1;
	pthread_mutex_lock(&mutex);
	pthread_cond_broadcast(&condition);
	pthread_mutex_unlock(&mutex);
	for (int i = 0; i < count; i++) {
		if (suspended && pthread_equal(threads[i], suspended))
			pthread_kill(suspended, SIGUSR1);
		pthread_join(threads[i], NULL);
	}
	printf("{\"rounds\":%lu,\"wakes\":%lu,\"reads\":%lu,\"register_checks\":%lu,\"suspends\":%lu,\"timer_signals\":%lu,\"longest_malloc_s\":%.6f,"
	       "\"eintr\":{\"sleep\":%lu,\"epoll\":%lu,\"poll\":%lu,\"semaphore\":%lu}}\n",
	       rounds, wakes, reads, register_checks, suspends, timer_signals, longest_malloc_ns / 1e9, sleep_eintr, epoll_eintr, poll_eintr,
	       semaphore_eintr);
	return 0;
}
