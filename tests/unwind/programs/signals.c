/* A timer's handler allocates, on an alternate stack, while the program works. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

static volatile long sink;

__attribute__((noinline, noclone)) static long in_handler(int depth)
{
	volatile char room[40];

	memset((char *)room, depth, sizeof(room));
	if (depth)
		return in_handler(depth - 1) + room[3];
	for (int i = 0; i < 300000; i++)
		sink += i;
	return sink;
}

static void handler(int signal)
{
	sink += in_handler(5) + signal;
}

__attribute__((noinline, noclone)) static long work(int depth)
{
	volatile long room[5];

	for (int i = 0; i < 5; i++)
		room[i] = depth * i;
	return depth ? work(depth - 1) + room[4] : room[2];
}

int main(int argc, char **argv)
{
	struct sigaction action = { .sa_handler = handler };
	struct itimerval every = { { 0, 1000 }, { 0, 1000 } };
	stack_t alternate = { .ss_sp = malloc(1 << 16), .ss_size = 1 << 16 };

	(void)argv;
	if (argc < 2) {
		sigaltstack(&alternate, NULL);
		action.sa_flags = SA_ONSTACK;
	}
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	for (int n = 0;; n++)
		sink += work(n % 30);
}
