/*
 * A process in which threads fork, start programs and are cancelled all the time, and whose heap always has free pages, so that calls fall
 * into all of that. Each of these is checked: anything wrong ends it by abort(). With the argument "exec" it instead replaces itself by
 * itself every 500 ms, and counts that. It runs until its standard input ends, and then prints what it counted as one line of JSON.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WRONG(...) do { fprintf(stderr, "WRONG: " __VA_ARGS__); fputc('\n', stderr); abort(); } while (0)

enum { BLOCKS = 6000, BLOCK_BYTES = 9000 };
static char *blocks[BLOCKS];
static atomic_int ending;
static unsigned long forks, spawns, cancels;
static int quiet[2];

/* Every eighth block stays; the others come and go. */
static void fill(int is_first)
{
	for (int i = 0; i < BLOCKS; i++) {
		if (i % 8 == 0 && !is_first) {
			if (blocks[i][0] != (char)i || blocks[i][BLOCK_BYTES - 1] != (char)i)
				WRONG("block %d was changed", i);
			continue;
		}
		blocks[i] = malloc(BLOCK_BYTES);
		memset(blocks[i], i, BLOCK_BYTES);
	}
	for (int i = 0; i < BLOCKS; i++)
		if (i % 8)
			free(blocks[i]);
}

static atomic_int is_filled;

/* All blocks are this thread's, so that those that stay keep its arena from shrinking by itself. */
static void *fill_again(void *unused)
{
	fill(1);
	is_filled = 1;
	while (!ending) {
		fill(0);
		usleep(200000);
	}
	return unused;
}

/* The child allocates, which hangs if a lock was held at the fork. */
static void *fork_always(void *unused)
{
	while (!ending) {
		pid_t child = fork();
		if (child == 0) {
			alarm(20);
			free(malloc(5000));
			malloc_trim(0);
			_exit(42);
		}
		int status;
		while (waitpid(child, &status, 0) < 0)
			if (errno != EINTR)
				WRONG("waitpid: %s", strerror(errno));
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 42)
			WRONG("a child ended with %x", status);
		forks++;
	}
	return unused;
}

static void *spawn_always(void *unused)
{
	while (!ending) {
		pid_t child;
		char *words[] = { "true", NULL };
		if (posix_spawn(&child, "/bin/true", NULL, NULL, words, NULL))
			WRONG("posix_spawn failed");
		int status;
		while (waitpid(child, &status, 0) < 0)
			if (errno != EINTR)
				WRONG("waitpid: %s", strerror(errno));
		if (status)
			WRONG("true ended with %x", status);
		spawns++;
		/* While it waits for the new program, no call is made in it. */
		usleep(20000);
	}
	return unused;
}

static void cleaned(void *flag)
{
	*(int *)flag = 1;
}

static void *wait_to_be_cancelled(void *flag)
{
	char c;
	pthread_cleanup_push(cleaned, flag);
	for (;;)
		if (read(quiet[0], &c, 1) >= 0)
			WRONG("a read of an empty pipe returned");
	pthread_cleanup_pop(0);
	return NULL;
}

static void *cancel_always(void *unused)
{
	while (!ending) {
		pthread_t thread;
		int is_cleaned = 0;
		void *result;
		pthread_create(&thread, NULL, wait_to_be_cancelled, &is_cleaned);
		usleep(2000);
		pthread_cancel(thread);
		pthread_join(thread, &result);
		if (result != PTHREAD_CANCELED || !is_cleaned)
			WRONG("a cancelled thread ended otherwise");
		cancels++;
	}
	return unused;
}

static void replace_myself(char **argv, unsigned long count)
{
	struct pollfd in = { 0, POLLIN, 0 };
	struct timespec begun, now;
	clock_gettime(CLOCK_MONOTONIC, &begun);
	for (;;) {
		int left = 500;
		clock_gettime(CLOCK_MONOTONIC, &now);
		left -= (now.tv_sec - begun.tv_sec) * 1000 + (now.tv_nsec - begun.tv_nsec) / 1000000;
		if (left <= 0)
			break;
		if (poll(&in, 1, left) > 0) {
			printf("{\"execs\":%lu}\n", count);
			exit(0);
		}
	}
	char number[32];
	snprintf(number, sizeof number, "%lu", count + 1);
	char *words[] = { argv[0], "exec", number, NULL };
	execv("/proc/self/exe", words);
	WRONG("execv: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	mallopt(M_MMAP_THRESHOLD, 1 << 30);
	if (argc > 1 && !strcmp(argv[1], "exec")) {
		fill(1);
		sigset_t mask;
		sigprocmask(SIG_SETMASK, NULL, &mask);
		for (int signal = 1; signal < 65; signal++)
			if (sigismember(&mask, signal) == 1)
				WRONG("signal %d is blocked after an exec", signal);
		if (argc < 3 && write(1, "ready\n", 6) != 6)
			return 1;
		replace_myself(argv, argc > 2 ? strtoul(argv[2], NULL, 10) : 0);
	}
	if (pipe(quiet))
		return 1;
	void *(*work[])(void *) = { fill_again, fork_always, spawn_always, cancel_always };
	pthread_t threads[4];
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, work[i], NULL);
	while (!is_filled)
		usleep(1000);
	if (write(1, "ready\n", 6) != 6)
		return 1;
	char c;
	ssize_t n;
	while ((n = read(0, &c, 1)) != 0)
		if (n < 0)
			WRONG("read: %s", strerror(errno));
	ending = 1;
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	printf("{\"forks\":%lu,\"spawns\":%lu,\"cancels\":%lu}\n", forks, spawns, cancels);
	return 0;
}
