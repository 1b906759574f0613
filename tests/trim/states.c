/*
 * A process whose heap has free pages, in a state that the first argument names. It prints "ready" once it is in it.
 */
#define _GNU_SOURCE
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { BLOCK_BYTES = 9000 };

/* Every eighth block stays: holes of whole pages. Through sbrk and mappings alike, without mappings of single blocks. */
static void make_holes(size_t bytes)
{
	size_t count = bytes / BLOCK_BYTES;
	char **blocks = malloc(count * sizeof *blocks);
	for (size_t i = 0; i < count; i++) {
		blocks[i] = malloc(BLOCK_BYTES);
		memset(blocks[i], 1, BLOCK_BYTES);
	}
	for (size_t i = 0; i < count; i++)
		if (i % 8)
			free(blocks[i]);
}

/* Free memory at the end of the heap, which stays there because of the threshold. */
static void leave_tail(size_t bytes)
{
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	char *block = malloc(bytes);
	memset(block, 1, bytes);
	free(block);
}

static void ready(void)
{
	if (write(1, "ready\n", 6) != 6)
		_exit(1);
}

static void wait_for_input(void)
{
	char c;
	while (read(0, &c, 1) < 0)
		;
}

static void deny(uint32_t call)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		_exit(1);
}

static ucontext_t back;

static void fibre(void)
{
	ready();
	wait_for_input();
}

static void on_alternate_stack(int signal)
{
	(void)signal;
	ready();
	wait_for_input();
}

static void *fill(void *bytes)
{
	make_holes((size_t)bytes);
	for (;;)
		pause();
	return NULL;
}

__attribute__((noinline)) static void wait_deep_down(void)
{
	char deep[2 << 20];
	__asm__ volatile("" : : "r"(deep) : "memory");
	ready();
	wait_for_input();
	__asm__ volatile("" : : "r"(deep) : "memory");
}

/* A word that a call which is over may have left. */
__attribute__((noinline)) static void wait_with_an_old_word(void)
{
	void *on_stack[1] = { (char *)malloc + 20 };
	__asm__ volatile("" : : "r"(on_stack) : "memory");
	ready();
	wait_for_input();
	__asm__ volatile("" : : "r"(on_stack) : "memory");
}

static ssize_t wait_while_written(void *unused, const char *text, size_t bytes)
{
	(void)unused;
	(void)text;
	static int is_told;
	if (!is_told++) {
		ready();
		wait_for_input();
		_exit(0);
	}
	return (ssize_t)bytes;
}

/* A real frame of the allocator's: its account is written through a function that waits. */
static void wait_in_the_allocator(void)
{
	FILE *out = fopencookie(NULL, "w", (cookie_io_functions_t){ .write = wait_while_written });
	setvbuf(out, NULL, _IONBF, 0);
	malloc_info(0, out);
}

static void wait_in_a_handler(int signal)
{
	(void)signal;
	ready();
	wait_for_input();
	_exit(0);
}

/* Interrupts the allocator in its middle: it reads from a block that does not exist. */
static void wait_in_a_handler_within_malloc(void)
{
	signal(SIGSEGV, wait_in_a_handler);
	void *volatile first = malloc(64);
	void *volatile second = malloc(64);
	free(first);
	free(second);
	/* The list's next block, protected by the place of the link (glibc 2.32 and later). */
	*(void *volatile *)second = (void *)((uintptr_t)16 ^ (uintptr_t)second >> 12);
	first = malloc(64);
	second = malloc(64);
}

static void *wait_in_thread(void *unused)
{
	(void)unused;
	ready();
	wait_for_input();
	_exit(0);
}

/* As programs that take any error of a read for the end of the connection. */
static void *receive_for_an_hour(void *unused)
{
	struct timeval hour = { 3600, 0 };
	int ends[2];
	char c;
	(void)unused;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) || setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &hour, sizeof hour))
		_exit(1);
	if (read(ends[0], &c, 1) < 0)
		_exit(3);
	return NULL;
}

/* The main thread never waits in a call that may be interrupted. */
static void in_a_thread_alone(pthread_attr_t *attributes)
{
	pthread_t thread;
	if (pthread_create(&thread, attributes, wait_in_thread, NULL))
		_exit(1);
	volatile uint64_t x = 1;
	for (;;)
		x = x * 3 + 1;
}

int main(int argc, char **argv)
{
	const char *state = argc > 1 ? argv[1] : "plain";
	size_t mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 16;
	size_t threads = argc > 3 ? strtoul(argv[3], NULL, 10) : 0;
	mallopt(M_MMAP_THRESHOLD, 1 << 30);
	for (size_t i = 0; i < threads; i++) {
		pthread_t thread;
		pthread_create(&thread, NULL, fill, (void *)((mib << 20) / threads));
	}
	if (threads)
		sleep(2);
	else if (!strcmp(state, "tail"))
		leave_tail(mib << 20);
	else
		make_holes(mib << 20);

	if (!strcmp(state, "strict")) {
		ready();
		prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
	} else if (!strcmp(state, "filter")) {
		deny(SYS_madvise);
		ready();
	} else if (!strcmp(state, "other_filter")) {
		deny(SYS_personality);
		ready();
	} else if (!strcmp(state, "vfork")) {
		if (vfork() == 0) {
			ready();
			wait_for_input();
			_exit(0);
		}
		return 0;
	} else if (!strcmp(state, "busy")) {
		ready();
		for (volatile uint64_t x = 1;; x = x * 3 + 1)
			;
	} else if (!strcmp(state, "small_stack")) {
		pthread_attr_t attributes;
		pthread_attr_init(&attributes);
		pthread_attr_setstacksize(&attributes, 16384);
		in_a_thread_alone(&attributes);
	} else if (!strcmp(state, "unguarded")) {
		pthread_attr_t attributes;
		pthread_attr_init(&attributes);
		void *stack = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		pthread_attr_setstack(&attributes, stack, 1 << 20);
		in_a_thread_alone(&attributes);
	} else if (!strcmp(state, "fibre")) {
		ucontext_t other;
		getcontext(&other);
		other.uc_stack.ss_sp = malloc(1 << 17);
		other.uc_stack.ss_size = 1 << 17;
		other.uc_link = &back;
		makecontext(&other, fibre, 0);
		swapcontext(&back, &other);
		return 0;
	} else if (!strcmp(state, "alternate_stack")) {
		stack_t stack = { .ss_sp = mmap(NULL, 1 << 17, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), .ss_size = 1 << 17 };
		struct sigaction action = { .sa_handler = on_alternate_stack, .sa_flags = SA_ONSTACK };
		sigaltstack(&stack, NULL);
		sigaction(SIGUSR1, &action, NULL);
		raise(SIGUSR1);
		return 0;
	} else if (!strcmp(state, "undumpable")) {
		prctl(PR_SET_DUMPABLE, 0);
		ready();
	} else if (!strcmp(state, "setuid")) {
		if (setresuid(65534, 65534, 0))
			_exit(1);
		prctl(PR_SET_DUMPABLE, 1);
		ready();
	} else if (!strcmp(state, "old_word")) {
		wait_with_an_old_word();
		return 0;
	} else if (!strcmp(state, "in_allocator")) {
		wait_in_the_allocator();
		return 0;
	} else if (!strcmp(state, "interrupted_malloc")) {
		wait_in_a_handler_within_malloc();
		return 0;
	} else if (!strcmp(state, "deep")) {
		wait_deep_down();
		return 0;
	} else if (!strcmp(state, "receives")) {
		struct pollfd input = { .fd = 0, .events = POLLIN };
		pthread_t thread;
		if (pthread_create(&thread, NULL, receive_for_an_hour, NULL))
			_exit(1);
		sleep(1);
		ready();
		while (poll(&input, 1, 20) == 0)
			;
	} else if (!strcmp(state, "sleeps")) {
		ready();
		for (;;) {
			struct timespec hour = { 3600, 0 };
			nanosleep(&hour, NULL);
		}
	} else {
		ready();
	}
	wait_for_input();
	return 0;
}
