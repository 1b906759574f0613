/* Everything at once: threads that allocate and free each other's blocks, short-lived threads with destructors that allocate, forks from
 * threads (children allocate, free inherited blocks, and end), vfork with exec, dlopen and dlclose, and signals at any moment. Every block
 * contains its own address and size and is checked before it is freed.
 * Arguments: threads, rounds. Prints "ok" at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOTS 4096

static void *_Atomic slots[SLOTS];
static long rounds;
static pthread_key_t key;

static void fail(const char *what)
{
	dprintf(2, "storm: %s (%s)\n", what, strerror(errno));
	abort();
}

static void *make(uint64_t r)
{
	size_t size = 16 + r % 2000;
	uintptr_t *p = NULL;

	errno = 77;
	switch (r >> 32 & 3) {
	case 0: p = malloc(size); break;
	case 1: p = calloc(1, size); break;
	case 2: p = realloc(NULL, size); break;
	case 3: if (posix_memalign((void **)&p, 64, size)) fail("posix_memalign"); break;
	}
	if (!p) fail("no memory");
	if (errno != 77) fail("errno was changed");
	p[0] = (uintptr_t)p;
	p[1] = size;
	return p;
}

static void drop(void *block)
{
	uintptr_t *p = block;

	if (!p) return;
	if (p[0] != (uintptr_t)p || p[1] > 4096) fail("a block was overwritten");
	p[0] = 0;
	errno = 78;
	free(p);
	if (errno != 78) fail("errno was changed by free");
}

static void at_thread_exit(void *value)
{
	drop(value);
	drop(make(12345));
}

/* Interrupts everything, including the sampler. */
static void on_signal(int signal)
{
	(void)signal;
}

static void *brief(void *argument)
{
	pthread_setspecific(key, make((uintptr_t)argument));
	for (uint64_t i = 0; i < 20; i++)
		drop(make(i * 77 + (i << 32)));
	return NULL;
}

static void child_work(uint64_t r)
{
	for (int i = 0; i < 64; i++) {
		drop(slots[(r + (uint64_t)i * 61) % SLOTS]);
		drop(make(r + (uint64_t)i));
		slots[(r + (uint64_t)i * 61) % SLOTS] = NULL;
	}
	_exit(0);
}

static void start_another(void)
{
	int status;
	pid_t child = vfork();

	if (child == 0) {
		execl("/bin/true", "true", NULL);
		_exit(1);
	}
	if (waitpid(child, &status, 0) != child || status) fail("vfork");
}

static void *work(void *argument)
{
	uint64_t r = 0x9e3779b97f4a7c15u * ((uintptr_t)argument + 1);

	for (long i = 0; i < rounds; i++) {
		r ^= r << 13, r ^= r >> 7, r ^= r << 17;
		drop(__atomic_exchange_n(&slots[r % SLOTS], make(r), __ATOMIC_ACQ_REL));
		if (r % 4001 == 0) {
			pthread_t id;
			if (pthread_create(&id, NULL, brief, (void *)r)) fail("pthread_create");
			pthread_join(id, NULL);
		}
		if (r % 20011 == 0) {
			void *library = dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL);
			void *other = dlopen("libstdc++.so.6", RTLD_NOW | RTLD_LOCAL);
			if (library) dlclose(library);
			if (other) dlclose(other);
		}
		if (r % 40009 == 0)
			start_another();
	}
	return NULL;
}

/* Forks while the others allocate. The child has only this thread; blocks that others were using are lost, the rest is intact. */
static void *forker(void *argument)
{
	(void)argument;
	for (long i = 0; i < rounds / 2000 + 3; i++) {
		pid_t child = fork();
		if (child < 0) fail("fork");
		if (child == 0) {
			for (int j = 0; j < 64; j++)
				drop(make((uint64_t)i * 977 + (uint64_t)j));
			if (i % 3 == 0) {
				pid_t grandchild = fork();
				if (grandchild == 0)
					child_work(1u << 31);
				waitpid(grandchild, NULL, 0);
			}
			_exit(0);
		}
		int status;
		if (waitpid(child, &status, 0) != child || status) fail("a forked child failed");
	}
	return NULL;
}

int main(int argc, char **argv)
{
	long threads = argc > 1 ? atol(argv[1]) : 8;
	pthread_t ids[256], fork_id;
	struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
	struct itimerval timer = { { 0, 3000 }, { 0, 3000 } };

	rounds = argc > 2 ? atol(argv[2]) : 20000;
	pthread_key_create(&key, at_thread_exit);
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &timer, NULL);
	if (pthread_create(&fork_id, NULL, forker, NULL)) fail("pthread_create");
	for (long i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, work, (void *)i)) fail("pthread_create");
	for (long i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	pthread_join(fork_id, NULL);
	for (int i = 0; i < SLOTS; i++)
		drop(slots[i]);
	puts("ok");
	return 0;
}
