/* `forks COUNT PER_S`: allocates in a loop and meanwhile forks COUNT children, PER_S per second; late ones are forked at once. Each child
 * allocates, frees and ends; its pid is printed. At the end it prints `ended COUNT in MS ms`, or an error, and continues to allocate. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

__attribute__((noipa)) static void pairs(int count)
{
	for (int i = 0; i < count; i++)
		free(malloc(64 + i % 64));
}

static int reap(int flags, long *ended)
{
	int status;

	while (waitpid(-1, &status, flags) > 0) {
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			printf("a child ended with %#x\n", status);
			return 1;
		}
		++*ended;
	}
	return 0;
}

int main(int argc, char **argv)
{
	long count = argc > 1 ? atol(argv[1]) : 200, per_s = argc > 2 ? atol(argv[2]) : 500, ended = 0, began;

	/* Waits for a line from the test. */
	if (getchar() == EOF)
		return 1;
	began = now_us();
	for (long forked = 0; forked < count; forked++) {
		pid_t child;

		while (now_us() - began < forked * 1000000 / per_s)
			pairs(200);
		child = fork();
		if (child < 0) {
			perror("fork");
			return 1;
		}
		if (!child) {
			pairs(100);
			_exit(0);
		}
		printf("%d\n", child);
		fflush(stdout);
		if (reap(WNOHANG, &ended))
			return 1;
	}
	if (reap(0, &ended))
		return 1;
	printf("ended %ld in %ld ms\n", ended, (now_us() - began) / 1000);
	fflush(stdout);
	for (;;)
		pairs(1000);
}
