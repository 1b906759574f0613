/*
 * Creates one problem with memory, reports it, and then executes commands: `trim` (malloc_trim), `purge` (of all of jemalloc's arenas),
 * `more` (continues with the problem).
 *
 * Usage: troubles healthy|leak|hoard|fragment|cache|tcache|adapted|arenas|huge|stacks|shared|files
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MIB = 1 << 20, MANY = 400000 };
static char *blocks[MANY];
static pthread_barrier_t made;
static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;

static char *touched(size_t bytes)
{
	char *block = malloc(bytes);
	if (!block)
		abort();
	memset(block, 1, bytes);
	return block;
}

/* Keeps every step-th of count blocks. */
static void keep_every(int count, size_t bytes, int step)
{
	for (int i = 0; i < count; i++)
		blocks[i] = touched(bytes);
	for (int i = 0; i < count; i++)
		if (i % step)
			free(blocks[i]);
}

/* Freeing a large block with its own mapping raises the thresholds to its size and twice that; then memory freed at the heap's end stays. */
static void adapted(void)
{
	free(touched(20 * MIB));
	for (int i = 0; i < 36 * 16; i++)
		blocks[i] = touched(64 << 10);
	for (int i = 36 * 16 - 1; i >= 0; i--)
		free(blocks[i]);
}

/* Large blocks of which only the beginning is used. */
static void sparse(void)
{
	for (int i = 0; i < 64; i++) {
		blocks[i] = malloc(MIB);
		if (!blocks[i])
			abort();
		memset(blocks[i], 1, 4096);
	}
}

static void purge(void)
{
	int (*ctl)(const char *, void *, size_t *, void *, size_t) =
		(int (*)(const char *, void *, size_t *, void *, size_t))dlsym(RTLD_DEFAULT, "mallctl");
	/* MALLCTL_ARENAS_ALL */
	if (!ctl || ctl("arena.4096.purge", NULL, NULL, NULL, 0))
		abort();
}

/* One thread after another: what threads that share an arena need together would otherwise depend on the scheduler. */
static void *arena_user(void *unused)
{
	static __thread char *own[3000];
	(void)unused;
	pthread_mutex_lock(&turn);
	for (int i = 0; i < 3000; i++)
		own[i] = touched(2000);
	for (int i = 0; i < 2999; i++)
		free(own[i]);
	pthread_mutex_unlock(&turn);
	pthread_barrier_wait(&made);
	pause();
	return NULL;
}

static void *deep(void *unused)
{
	char frame[4 * MIB];
	(void)unused;
	memset(frame, 1, sizeof frame);
	__asm__ volatile("" : : "r"(frame) : "memory");
	pthread_barrier_wait(&made);
	pause();
	return NULL;
}

static void threads(int count, void *(*work)(void *))
{
	pthread_barrier_init(&made, NULL, (unsigned)count + 1);
	for (int i = 0; i < count; i++) {
		pthread_t thread;
		if (pthread_create(&thread, NULL, work, NULL))
			abort();
	}
	pthread_barrier_wait(&made);
}

static void leak(void)
{
	for (int i = 0; i < 20000; i++)
		touched(1000);
}

static void map(const char *path, int flags)
{
	int fd = path ? open(path, O_RDONLY) : -1;
	char *at = mmap(NULL, 64 * MIB, path ? PROT_READ : PROT_READ | PROT_WRITE, flags, fd, 0);
	volatile char sum = 0;
	if (at == MAP_FAILED)
		abort();
	if (!path)
		memset(at, 1, 64 * MIB);
	for (size_t i = 0; i < 64 * MIB; i += 4096)
		sum += at[i];
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "healthy";
	static char line[64], in[4096], out[4096];
	/* A request as large as a stream's buffer would merge the chunks in fastbins. */
	setvbuf(stdin, in, _IOFBF, sizeof in);
	setvbuf(stdout, out, _IOFBF, sizeof out);
	if (!strcmp(what, "healthy"))
		keep_every(100000, 500, 1);
	else if (!strcmp(what, "leak"))
		keep_every(20000, 500, 1), leak();
	else if (!strcmp(what, "hoard"))
		keep_every(100000, 1000, 99999);
	else if (!strcmp(what, "fragment"))
		keep_every(300000, 200, 16);
	else if (!strcmp(what, "cache"))
		keep_every(MANY, 80, MANY + 1);
	else if (!strcmp(what, "tcache"))
		keep_every(40000, 1000, 40001);
	else if (!strcmp(what, "adapted"))
		adapted();
	else if (!strcmp(what, "huge"))
		sparse();
	else if (!strcmp(what, "arenas"))
		threads(16, arena_user);
	else if (!strcmp(what, "stacks"))
		threads(16, deep);
	else if (!strcmp(what, "shared"))
		map(NULL, MAP_SHARED | MAP_ANONYMOUS);
	else if (!strcmp(what, "files"))
		map(argv[2], MAP_PRIVATE);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		if (!strncmp(line, "trim", 4))
			malloc_trim(0);
		else if (!strncmp(line, "purge", 5))
			purge();
		else if (!strncmp(line, "more", 4))
			leak();
		printf("done\n");
		fflush(stdout);
	}
	return 0;
}
