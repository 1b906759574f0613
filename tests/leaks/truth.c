/* Blocks whose owners are known, to test leak detection: truth FILE [THREADS KOPS]
 *
 * Writes a line per block to FILE: its address and its kind. Blocks named leak-… must be found, hidden-… and stale may be, others must not.
 * Each of THREADS threads moves, frees and allocates blocks, KOPS thousand times per second (0: as fast as it can).
 * On standard input, "ops" prints the number of operations so far; the end of input ends the program. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static FILE *truth_file;
static pthread_mutex_t truth_lock = PTHREAD_MUTEX_INITIALIZER;

static void *made(size_t bytes, const char *what)
{
	char *block = malloc(bytes);
	memset(block, 0x5a, bytes);
	fprintf(truth_file, "%lx %s\n", (unsigned long)block, what);
	return block;
}

/* Owners are not static: a compiler removes static variables that are written and never read. */

/* A tree with names, as in a map. */
struct person {
	struct person *left, *right;
	char *name, *value;
};
struct person *phonebook;

static struct person *book(int from, int to)
{
	if (from >= to)
		return NULL;
	int middle = (from + to) / 2;
	struct person *one = made(sizeof *one, "map-node");
	one->name = made(30 + middle % 20, "map-key");
	one->value = made(60 + middle % 100, "map-value");
	one->left = book(from, middle);
	one->right = book(middle + 1, to);
	return one;
}

/* Links in the middle of an object, far into it, and as its last word. */
struct link {
	struct link *next;
};
struct near {
	char name[24];
	struct link link;
	char rest[40];
};
struct far {
	char body[200];
	struct link link;
	char rest[8];
};
struct tail {
	char body[192];
	struct link link;
};
struct link *near_list, *far_list, *tail_list;

/* Pointers with marks in their low bits, in their high ones, XORed and in 32 bits. */
struct word {
	uintptr_t next;
	char body[40];
};
uintptr_t tagged_low, tagged_high;
struct word *xor_first, *xor_last;
uintptr_t compressed_base;
uint32_t compressed_first;

void *shared_a[5000], *shared_b[5000];
_Thread_local void *own[1000];

static void build(void)
{
	phonebook = book(0, 50000);
	for (int i = 0; i < 5000; i++) {
		struct near *near = made(sizeof *near, "intrusive-near");
		near->link.next = near_list;
		near_list = &near->link;
		struct far *far = made(sizeof *far, "intrusive-far");
		far->link.next = far_list;
		far_list = &far->link;
		struct tail *tail = made(sizeof *tail, "intrusive-tail");
		tail->link.next = tail_list;
		tail_list = &tail->link;
		struct word *low = made(sizeof *low, "tagged-low");
		low->next = tagged_low;
		tagged_low = (uintptr_t)low | 1 | (i & 2);
		shared_a[i] = shared_b[i] = made(72, "shared");
	}
	struct word *before = NULL, *last = NULL;
	for (int i = 0; i < 2000; i++) {
		struct word *high = made(sizeof *high, "hidden-high");
		high->next = tagged_high;
		tagged_high = (uintptr_t)high | (uintptr_t)((i & 0x7fff) | 1) << 48;
		struct word *xored = made(sizeof *xored, "hidden-xor");
		xored->next = (uintptr_t)last ^ (uintptr_t)before;
		if (last)
			last->next ^= (uintptr_t)xored;
		else
			xor_first = xored;
		before = last;
		last = xored;
		struct word *half = made(sizeof *half, "hidden-32");
		if (!compressed_base)
			compressed_base = (uintptr_t)half & ~0xfffffffful;
		half->next = compressed_first;
		compressed_first = (uint32_t)(((uintptr_t)half - compressed_base) >> 4);
	}
	xor_last = last;
}

void *kept[500];

/* 10,000 blocks to which nothing points, and 1,000 to which only freed memory does. */
static __attribute__((noinline)) void leak(void)
{
	static const size_t sizes[] = {24, 40, 100, 256, 1000, 5000};
	for (int i = 0; i < 6000; i++)
		made(sizes[i % 6], "leak-single");
	for (int chain = 0; chain < 100; chain++) {
		void **before = NULL;
		for (int i = 0; i < 20; i++) {
			void **one = made(64, "leak-chain");
			one[0] = before;
			before = one;
		}
	}
	for (int cycle = 0; cycle < 200; cycle++) {
		void **first = made(80, "leak-cycle"), **last = first;
		for (int i = 1; i < 10; i++) {
			void **one = made(80, "leak-cycle");
			last[0] = one;
			one[1] = last;
			last = one;
		}
		last[0] = first;
	}
	for (int i = 0; i < 1000; i++) {
		void **owner = malloc(1800);
		owner[100] = made(88, "stale");
		free(owner);
		if (i % 2) {
			kept[i / 2] = malloc(1800);
			fprintf(truth_file, "%lx kept\n", (unsigned long)kept[i / 2]);
		}
	}
}

static __attribute__((noinline)) void wipe(void)
{
	volatile char stack[65536];
	for (size_t i = 0; i < sizeof stack; i++)
		stack[i] = 0;
}

static void *thread_local_owner(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&truth_lock);
	for (int i = 0; i < 1000; i++)
		own[i] = made(512, "thread-local");
	pthread_mutex_unlock(&truth_lock);
	wipe();
	for (;;)
		pause();
	return NULL;
}

static void *stack_owner(void *unused)
{
	(void)unused;
	pthread_mutex_lock(&truth_lock);
	char *volatile block = made(2000, "stack");
	pthread_mutex_unlock(&truth_lock);
	for (;;) {
		pause();
		if (block[0] == 'Z')
			puts("never");
	}
	return NULL;
}

/* The only pointer is in a register that the kernel saves at the system call: callee-saved, so that pause() need not spill it. */
static __attribute__((noinline)) void hold_in_register(char *volatile *slot)
{
#ifdef __x86_64__
	register char *block __asm__("rbx") = *slot;
	*slot = NULL;
	wipe();
	for (;;)
		__asm__ volatile("mov $34, %%eax\n\tsyscall" : "+r"(block) : : "rax", "rcx", "r11", "memory");
#else
	for (;;)
		pause();
	(void)slot;
#endif
}

static void *register_owner(void *unused)
{
	(void)unused;
	static char *volatile slot;
	pthread_mutex_lock(&truth_lock);
	slot = made(2000, "register");
	pthread_mutex_unlock(&truth_lock);
	wipe();
	hold_in_register(&slot);
	return NULL;
}

/* A table of lists: nodes move from list to list, are freed and allocated, so that pointers move all the time. */
#define LISTS 4096
struct node {
	struct node *next, *prev;
	char *payload;
};
struct churn {
	struct node heads[LISTS];
	uint64_t random;
	int kops;
};
static atomic_ulong operations;

static uint64_t next_random(struct churn *churn)
{
	churn->random ^= churn->random << 13;
	churn->random ^= churn->random >> 7;
	return churn->random ^= churn->random << 17;
}

static struct node *any(struct churn *churn)
{
	return &churn->heads[next_random(churn) % LISTS];
}

static struct node *cut(struct node *one)
{
	one->prev->next = one->next;
	one->next->prev = one->prev;
	return one;
}

static void put(struct node *head, struct node *one)
{
	one->next = head->next;
	one->prev = head;
	head->next->prev = one;
	head->next = one;
}

static void add(struct churn *churn)
{
	struct node *one = malloc(sizeof *one);
	size_t bytes = 20 + next_random(churn) % 200;
	one->payload = malloc(bytes);
	memset(one->payload, 'x', bytes);
	put(any(churn), one);
}

static void *run_churn(void *argument)
{
	struct churn *churn = argument;
	for (int i = 0; i < LISTS; i++)
		churn->heads[i].next = churn->heads[i].prev = &churn->heads[i];
	for (int i = 0; i < 300000; i++)
		add(churn);
	struct timespec next;
	clock_gettime(CLOCK_MONOTONIC, &next);
	for (unsigned long n = 1;; n++) {
		struct node *from = any(churn), *to = any(churn);
		if (from->next != from)
			put(to, cut(from->next));
		struct node *last = any(churn);
		if (last->prev != last) {
			struct node *gone = cut(last->prev);
			free(gone->payload);
			free(gone);
		}
		add(churn);
		if (n % 500)
			continue;
		operations += 500;
		if (churn->kops > 0) {
			next.tv_nsec += 500 * 1000000L / churn->kops;
			next.tv_sec += next.tv_nsec / 1000000000L;
			next.tv_nsec %= 1000000000L;
			clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &next, NULL);
		}
	}
	return NULL;
}

static void start(void *(*run)(void *), void *argument)
{
	pthread_t thread;
	if (pthread_create(&thread, NULL, run, argument))
		abort();
	pthread_detach(thread);
}

int main(int argc, char **argv)
{
	static char buffer[65536];
	truth_file = fopen(argc > 1 ? argv[1] : "/dev/null", "w");
	if (!truth_file)
		return 2;
	setvbuf(truth_file, buffer, _IOFBF, sizeof buffer);
	build();
	leak();
	wipe();
	for (int i = 0; i < 3; i++)
		start(thread_local_owner, NULL);
	start(stack_owner, NULL);
	start(register_owner, NULL);
	usleep(500000);
	pthread_mutex_lock(&truth_lock);
	fflush(truth_file);
	pthread_mutex_unlock(&truth_lock);
	for (int i = 0; i < (argc > 3 ? atoi(argv[2]) : 0); i++) {
		struct churn *churn = calloc(1, sizeof *churn);
		churn->random = 88172645463325252ull + i;
		churn->kops = atoi(argv[3]);
		start(run_churn, churn);
	}
	if (argc > 3) {
		while (operations < 1000)
			usleep(1000);
	}
	wipe();
	puts("ready");
	fflush(stdout);
	char line[16];
	while (fgets(line, sizeof line, stdin)) {
		printf("%lu\n", operations);
		fflush(stdout);
	}
	/* For LeakSanitizer and memcheck, which check at the end of the program. */
	exit(0);
}
