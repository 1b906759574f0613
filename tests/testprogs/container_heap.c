/*
 * Holds memory in a container: 40 MB in blocks, of which it frees every second one. SIGUSR1 makes it allocate more, for a recording;
 * SIGTERM ends it. With `grow`, SIGUSR1 starts a child that grows until it is killed. With `pause` it holds nothing.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BLOCKS 40960
#define BLOCK_BYTES 1000

static char *volatile held[BLOCKS];
static volatile sig_atomic_t more;

static void on_signal(int number)
{
	if (number == SIGTERM)
		_exit(0);
	more = 1;
}

__attribute__((noipa)) static void site_hold(void)
{
	for (int i = 0; i < BLOCKS; i++) {
		held[i] = malloc(BLOCK_BYTES);
		memset(held[i], 1, BLOCK_BYTES);
	}
}

__attribute__((noipa)) static void site_more(void)
{
	static char *volatile kept[100];
	for (int i = 0; i < 100; i++) {
		kept[i] = malloc(5000);
		memset(kept[i], 1, 5000);
	}
}

static void grow(void)
{
	for (;;)
		memset(malloc(1 << 20), 1, 1 << 20);
}

int main(int argc, char **argv)
{
	int grows = argc > 1 && !strcmp(argv[1], "grow");

	signal(SIGTERM, on_signal);
	signal(SIGUSR1, on_signal);
	if (argc == 1) {
		site_hold();
		for (int i = 0; i < BLOCKS; i += 2) {
			free(held[i]);
			held[i] = NULL;
		}
	}
	if (grows && fork() > 0)
		for (;;)
			pause();
	for (;;) {
		pause();
		if (!more)
			continue;
		more = 0;
		if (grows)
			grow();
		site_more();
	}
}
