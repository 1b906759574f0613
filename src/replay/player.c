/*
 * The player: makes the allocator calls of a recorded process, in their order, under whatever allocator and settings the loader gave it.
 *
 * The heap belongs to the recorded calls alone. The player itself allocates nothing: its tables, the threads' stacks and the ring are
 * shared mappings, so that the process's anonymous memory is the allocator's, but for a few pages of libraries' data.
 *
 * One thread makes all calls, and wears the thread-local storage of the thread whose call it is: a thread per recorded thread only lends it,
 * parked, until its recorded end, when it returns and its destructors run. So the order of the calls is exact, and arenas and thread caches
 * are assigned as if each thread called.
 *
 * Time is the trace's: the clocks of this process, which allocators ask before they return memory, follow the recorded times.
 *
 * Symbols of the C library are used without versions, and only those of stubs.c, so that the file runs under any glibc.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

#include "player.h"

#define TICK_NS 10000ULL
#define PAGE_BYTES 4096UL
#define STACK_BYTES (128UL << 10)
/* Rounds of waiting before the thread sleeps. */
#define SPINS 200

void *malloc(size_t);
void *calloc(size_t, size_t);
void *realloc(void *, size_t);
void free(void *);
int posix_memalign(void **, size_t, size_t);

/* System calls. */

static long call6(long number, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = number;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;

	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "the player is written for x86-64 and arm64"
#endif
}

static void wait_for_change(unsigned int *word, unsigned int seen)
{
	call6(SYS_futex, (long)word, FUTEX_WAIT, seen, 0, 0, 0);
}

static void wake(unsigned int *word)
{
	call6(SYS_futex, (long)word, FUTEX_WAKE, 1 << 30, 0, 0, 0);
}

static _Noreturn void end(int status)
{
	for (;;)
		call6(SYS_exit_group, status, 0, 0, 0, 0, 0);
}

static void relax(void)
{
#if defined(__x86_64__)
	__asm__ volatile("pause");
#else
	__asm__ volatile("yield");
#endif
}

/* A mapping that is not anonymous memory in the kernel's account. */
static void *own_memory(unsigned long bytes)
{
	long at = call6(SYS_mmap, 0, (long)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at < 0 && at > -4096)
		end(3);
	return (void *)at;
}

/* The clocks of this process. */

static volatile unsigned long long trace_ns;
static long long offset_ns[CLOCK_BOOTTIME + 1];
static int is_playing;

static long long system_ns(clockid_t clock)
{
	struct timespec time = { 0, 0 };

	call6(SYS_clock_gettime, clock, (long)&time, 0, 0, 0, 0);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int is_wall(clockid_t clock)
{
	return clock == CLOCK_REALTIME || clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_RAW || clock == CLOCK_REALTIME_COARSE ||
	       clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_BOOTTIME;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
	long long now;

	if (!is_playing || !is_wall(clock))
		return (int)call6(SYS_clock_gettime, clock, (long)time, 0, 0, 0, 0);
	now = offset_ns[clock] + (long long)trace_ns;
	time->tv_sec = now / 1000000000LL;
	time->tv_nsec = now % 1000000000LL;
	return 0;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
	struct timespec now;

	(void)zone;
	clock_gettime(CLOCK_REALTIME, &now);
	time->tv_sec = now.tv_sec;
	time->tv_usec = now.tv_nsec / 1000;
	return 0;
}

/* Threads. */

enum { NONE, PARKED, LEAVING };

struct thread {
	unsigned long storage; /* thread pointer */
	unsigned int state;
	pthread_t handle;
	void *stack;
};

static struct thread *threads;
static unsigned long own_storage;

#if defined(__x86_64__)
static int has_fsgsbase;

static __attribute__((always_inline)) inline void wear(unsigned long storage)
{
	if (has_fsgsbase)
		__asm__ volatile("wrfsbase %0" ::"r"(storage) : "memory");
	else
		call6(SYS_arch_prctl, 0x1002 /* ARCH_SET_FS */, (long)storage, 0, 0, 0, 0);
}

static unsigned long worn(void)
{
	unsigned long storage;

	/* The ABI has the thread pointer's own value in its first word. */
	__asm__ volatile("mov %%fs:0, %0" : "=r"(storage));
	return storage;
}
#else
static __attribute__((always_inline)) inline void wear(unsigned long storage)
{
	__asm__ volatile("msr tpidr_el0, %0" ::"r"(storage) : "memory");
}

static unsigned long worn(void)
{
	unsigned long storage;

	__asm__ volatile("mrs %0, tpidr_el0" : "=r"(storage));
	return storage;
}
#endif

static void *lend(void *argument)
{
	struct thread *thread = argument;

	thread->storage = worn();
	__atomic_store_n(&thread->state, PARKED, __ATOMIC_RELEASE);
	wake(&thread->state);
	while (__atomic_load_n(&thread->state, __ATOMIC_ACQUIRE) == PARKED)
		wait_for_change(&thread->state, PARKED);
	return NULL;
}

/* The thread pointer of a recorded thread, which is created at its first call. */
static unsigned long storage_of(struct fp_player *player, unsigned int number)
{
	struct thread *thread;
	pthread_attr_t attributes;

	if (!number || number >= player->threads_max)
		return own_storage;
	thread = &threads[number];
	if (thread->state == PARKED)
		return thread->storage;
	if (!thread->stack)
		thread->stack = own_memory(STACK_BYTES);
	pthread_attr_init(&attributes);
	pthread_attr_setstack(&attributes, thread->stack, STACK_BYTES);
	if (pthread_create(&thread->handle, &attributes, lend, thread)) {
		player->thread_failures++;
		thread->storage = own_storage;
		thread->state = NONE;
		return own_storage;
	}
	while (__atomic_load_n(&thread->state, __ATOMIC_ACQUIRE) != PARKED)
		wait_for_change(&thread->state, NONE);
	return thread->storage;
}

static void end_thread(struct fp_player *player, unsigned int number)
{
	struct thread *thread = &threads[number];

	if (!number || number >= player->threads_max || thread->state != PARKED)
		return;
	__atomic_store_n(&thread->state, LEAVING, __ATOMIC_RELEASE);
	wake(&thread->state);
	pthread_join(thread->handle, NULL);
	thread->state = NONE;
}

/* Samples. */

static int statm = -1;

/* Anonymous pages: resident minus those of files and shared memory, fields 2 and 3 of /proc/self/statm. */
static unsigned long anonymous_pages(void)
{
	char text[128];
	unsigned long field[3] = { 0, 0, 0 };
	long bytes = call6(SYS_pread64, statm, (long)text, sizeof(text), 0, 0, 0), i;
	int at = 0;

	for (i = 0; i < bytes && at < 3; i++)
		if (text[i] >= '0' && text[i] <= '9')
			field[at] = field[at] * 10 + (unsigned long)(text[i] - '0');
		else
			at++;
	return field[1] > field[2] ? field[1] - field[2] : 0;
}

static void sample(struct fp_player *player, unsigned int index)
{
	unsigned long long *samples = (void *)((char *)player + FP_PLAYER_HEAD_BYTES);
	unsigned long pages = anonymous_pages();

	if (index < FP_PLAYER_SAMPLES_MAX)
		samples[index] = pages;
	if (pages > player->peak_pages)
		player->peak_pages = pages;
}

/* What the program did with the block. */
static void touch(char *block, unsigned long from, unsigned long to)
{
	unsigned long at;

	if (from >= to)
		return;
	*(volatile char *)(block + from) = 1;
	for (at = ((unsigned long)(block + from) | (PAGE_BYTES - 1)) + 1; at < (unsigned long)(block + to); at += PAGE_BYTES)
		*(volatile char *)at = 1;
}

static void **blocks;

/* Runs with another thread's storage: it must not use its own. */
static __attribute__((noinline)) void *call(const struct fp_play *play)
{
	void *block = NULL;

	switch (play->op) {
	case FP_PLAY_ALLOC:
		if (!play->alignment_bits)
			return malloc(play->bytes);
		return posix_memalign(&block, 1UL << (play->alignment_bits < 3 ? 3 : play->alignment_bits), play->bytes) ? NULL : block;
	case FP_PLAY_ZEROED:
		return calloc(1, play->bytes);
	case FP_PLAY_REALLOC:
		return realloc(blocks[play->block], play->bytes);
	case FP_PLAY_FREE:
		free(blocks[play->block]);
		return NULL;
	}
	return NULL;
}

static void make_call(struct fp_player *player, const struct fp_play *play)
{
	unsigned long storage = storage_of(player, play->thread);
	int is_timed = player->calls++ % FP_PLAYER_TIMED == 0;
	long long began = is_timed ? system_ns(CLOCK_MONOTONIC) : 0;
	void *block;

	if (play->block >= player->blocks_max)
		end(4);
	if (storage != own_storage)
		wear(storage);
	block = call(play);
	if (storage != own_storage)
		wear(own_storage);
	if (is_timed) {
		player->timed_ns += (unsigned long long)(system_ns(CLOCK_MONOTONIC) - began);
		player->timed_calls++;
	}
	if (play->op == FP_PLAY_FREE) {
		blocks[play->block] = NULL;
	} else if (block) {
		blocks[play->block] = block;
		touch(block, play->touch_from, play->touch_to);
	} else {
		player->failures++;
	}
}

static void pause_here(struct fp_player *player)
{
	unsigned int number = player->paused + 1, seen;

	__atomic_store_n(&player->paused, number, __ATOMIC_SEQ_CST);
	wake(&player->paused);
	while ((seen = __atomic_load_n(&player->resumed, __ATOMIC_SEQ_CST)) < number)
		wait_for_change(&player->resumed, seen);
}

/* The number of calls written, which is not `done`. */
static unsigned int await_calls(struct fp_player *player, unsigned int done)
{
	unsigned int head;
	int i;

	for (i = 0; i < SPINS; i++) {
		head = __atomic_load_n(&player->head, __ATOMIC_ACQUIRE);
		if (head != done)
			return head;
		relax();
	}
	__atomic_store_n(&player->player_waits, 1, __ATOMIC_SEQ_CST);
	while ((head = __atomic_load_n(&player->head, __ATOMIC_SEQ_CST)) == done)
		wait_for_change(&player->head, done);
	__atomic_store_n(&player->player_waits, 0, __ATOMIC_SEQ_CST);
	return head;
}

static void publish(struct fp_player *player, unsigned int done)
{
	__atomic_store_n(&player->tail, done, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(&player->writer_waits, __ATOMIC_SEQ_CST))
		wake(&player->tail);
}

static _Noreturn void play_all(struct fp_player *player)
{
	const struct fp_play *ring = (void *)((char *)player + FP_PLAYER_HEAD_BYTES + 8 * FP_PLAYER_SAMPLES_MAX);
	unsigned int done = 0;

	for (;;) {
		unsigned int head = await_calls(player, done);

		while (done != head) {
			const struct fp_play *play = &ring[done % FP_PLAYER_RING];

			trace_ns += play->ticks * TICK_NS;
			switch (play->op) {
			case FP_PLAY_THREAD_END:
				end_thread(player, play->thread);
				break;
			case FP_PLAY_SAMPLE:
				sample(player, play->block);
				break;
			case FP_PLAY_PAUSE:
				pause_here(player);
				break;
			case FP_PLAY_END:
				end(0);
			default:
				make_call(player, play);
			}
			done++;
			if (done % (FP_PLAYER_RING / 8) == 0)
				publish(player, done);
		}
		publish(player, done);
	}
}

/* `stack`: the arguments, the environment and the auxiliary vector. */
__attribute__((used)) static _Noreturn void play(unsigned long *stack)
{
	const clockid_t clocks[] = { CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_MONOTONIC_RAW, CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC_COARSE,
				     CLOCK_BOOTTIME };
	unsigned long bytes = FP_PLAYER_HEAD_BYTES + 8 * FP_PLAYER_SAMPLES_MAX + sizeof(struct fp_play) * FP_PLAYER_RING;
	long shared = call6(SYS_mmap, 0, (long)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, FP_PLAYER_FD, 0);
	struct fp_player *player = (void *)shared;
	unsigned long *at = stack + stack[0] + 2;
	unsigned int i;

	if (shared < 0 && shared > -4096)
		end(5);
	while (*at++)
		;
	for (; at[0] != AT_NULL; at += 2) {
#if defined(__x86_64__)
		/* HWCAP2_FSGSBASE, arch/x86/include/uapi/asm/hwcap2.h. */
		if (at[0] == AT_HWCAP2)
			has_fsgsbase = (at[1] & 2) != 0;
#endif
	}
	blocks = own_memory(8UL * player->blocks_max + PAGE_BYTES);
	player->blocks_at = (unsigned long)blocks;
	threads = own_memory(sizeof(struct thread) * player->threads_max + PAGE_BYTES);
	statm = (int)call6(SYS_openat, AT_FDCWD, (long)"/proc/self/statm", O_RDONLY | O_CLOEXEC, 0, 0, 0);
	own_storage = worn();
	for (i = 0; i < sizeof(clocks) / sizeof(clocks[0]); i++)
		offset_ns[clocks[i]] = system_ns(clocks[i]);
	is_playing = 1;
	__atomic_store_n(&player->has_started, 1, __ATOMIC_SEQ_CST);
	play_all(player);
}

#if defined(__x86_64__)
__asm__(".text\n"
	".globl _start\n"
	".type _start, @function\n"
	"_start:\n"
	"	xor %ebp, %ebp\n"
	"	mov %rsp, %rdi\n"
	"	and $-16, %rsp\n"
	"	call play\n"
	".size _start, . - _start\n");
#else
__asm__(".text\n"
	".globl _start\n"
	".type _start, %function\n"
	"_start:\n"
	"	mov x29, xzr\n"
	"	mov x30, xzr\n"
	"	mov x0, sp\n"
	"	b play\n"
	".size _start, . - _start\n");
#endif
