/* A program that allocates in different ways, for the tests of recordings from inside.
 *
 *   until PIDFILE STOPFILE DONEFILE   pairs until there is a file to stop at
 *   kill PIDFILE N                    N blocks that it keeps, then kills itself
 *   storm N                           four threads with N pairs each
 *   fork                              10 blocks; a child frees 3 of them and makes 2 */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void *volatile sink;
static void *kept[1 << 20];

__attribute__((noinline)) static void *site_kept(size_t bytes)
{
	void *block = malloc(bytes);

	__asm__ volatile("" : : "r"(block));
	return block;
}

static void say_pid(const char *path)
{
	FILE *file = fopen(path, "w");

	fprintf(file, "%d\n", getpid());
	fclose(file);
}

static void pairs(long count)
{
	for (long i = 0; i < count; i++) {
		sink = malloc(32);
		free(sink);
	}
}

static void *storm(void *count)
{
	for (long i = 0; i < (long)count; i++) {
		void *block = malloc(32);

		__asm__ volatile("" : : "r"(block));
		free(block);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	pthread_t threads[4];

	if (argc == 5 && !strcmp(argv[1], "until")) {
		say_pid(argv[2]);
		while (access(argv[3], F_OK))
			pairs(10000);
		fclose(fopen(argv[4], "w"));
	} else if (argc == 4 && !strcmp(argv[1], "kill")) {
		for (long i = 0; i < atol(argv[3]); i++)
			kept[i] = site_kept(24);
		kill(getpid(), SIGKILL);
	} else if (argc == 3 && !strcmp(argv[1], "storm")) {
		for (int i = 0; i < 4; i++)
			pthread_create(&threads[i], NULL, storm, (void *)atol(argv[2]));
		for (int i = 0; i < 4; i++)
			pthread_join(threads[i], NULL);
	} else if (argc == 2 && !strcmp(argv[1], "fork")) {
		for (int i = 0; i < 10; i++)
			kept[i] = site_kept(100);
		pid_t child = fork();
		if (child == 0) {
			for (int i = 0; i < 3; i++)
				free(kept[i]);
			kept[10] = site_kept(100);
			kept[11] = site_kept(100);
			_exit(0);
		}
		waitpid(child, NULL, 0);
	} else {
		return 2;
	}
	return 0;
}
