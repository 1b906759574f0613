/*
 * Records its own stacks, for machines whose programs only run in emulation, where they cannot be stopped from outside: a timer interrupts
 * the work at any instruction, and the handler writes the interrupted stack and its own.
 *
 * Writes records to standard output: a letter, a number, and this many bytes.
 *   M  the text of /proc/self/maps
 *   T  an address, then the bytes there: code in no file
 *   I  34 words: x0 to x30, sp, pc, an address; then the stack from that address on: as interrupted
 *   H  the same in the handler, after each I.
 */
#define _GNU_SOURCE
#include <alloca.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

extern void *__libc_stack_end;

static volatile int left;
static void *volatile keep;

static void put(const void *bytes, size_t length)
{
	while (length) {
		ssize_t done = write(1, bytes, length);

		if (done <= 0)
			_exit(1);
		bytes = (const char *)bytes + done;
		length -= done;
	}
}

static void head(char letter, unsigned long long length)
{
	put(&letter, 1);
	put(&length, sizeof(length));
}

static void record(char letter, const mcontext_t *registers)
{
	unsigned long long begin = registers->sp & ~15ULL, end = ((unsigned long long)__libc_stack_end + 256) & ~15ULL;

	head(letter, 34 * 8 + end - begin);
	put(registers->regs, 31 * 8);
	put(&registers->sp, 8);
	put(&registers->pc, 8);
	put(&begin, 8);
	put((const void *)begin, end - begin);
}

static void on_alarm(int signal, siginfo_t *info, void *context)
{
	ucontext_t here;

	if (left <= 0)
		return;
	record('I', &((ucontext_t *)context)->uc_mcontext);
	getcontext(&here);
	record('H', &here.uc_mcontext);
	left -= 1;
}

static void maps(void)
{
	static char text[1 << 16];
	size_t length = fread(text, 1, sizeof(text) - 1, fopen("/proc/self/maps", "r"));
	char *line = text, *next;

	head('M', length);
	put(text, length);
	for (; *line; line = next) {
		unsigned long long begin, end, inode;
		char execute;

		next = strchrnul(line, '\n');
		next += *next == '\n';
		if (sscanf(line, "%llx-%llx %*c%*c%c%*c %*s %*s %llu", &begin, &end, &execute, &inode) == 4 && execute == 'x' && !inode) {
			head('T', 8 + end - begin);
			put(&begin, 8);
			put((const void *)begin, end - begin);
		}
	}
}

static int compare(const void *a, const void *b)
{
	volatile char room[40];

	room[0] = 1;
	return *(const int *)a - *(const int *)b - room[0] + 1;
}

__attribute__((noinline, noclone)) static int leaf(int n)
{
	int i, sum = 0;

	for (i = 0; i < 50; i++)
		sum = sum * 31 + (n ^ i);
	return sum;
}

__attribute__((noinline, noclone)) static int down(int depth, int n)
{
	char *room = alloca(16 + (n & 63)), text[64];
	int numbers[40], i;

	memset(room, depth, 16);
	if (depth)
		return down(depth - 1, n + leaf(n)) + room[3];
	for (i = 0; i < 40; i++)
		numbers[i] = leaf(n + i) & 0xffff;
	qsort(numbers, 40, sizeof(numbers[0]), compare);
	keep = malloc(100 + (n & 1023));
	snprintf(text, sizeof(text), "%d %f %s", n, (double)n / 7, "text");
	free(keep);
	return numbers[7] + text[2];
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval every = { { 0, 1700 }, { 0, 1700 } };
	int n = 0;

	left = argc > 1 ? atoi(argv[1]) : 100;
	maps();
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	while (left > 0)
		n += down(n & 15, n);
	return 0;
}
