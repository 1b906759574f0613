/*
 * Signal handlers that allocate, on alternate stacks below and above the interrupted one, raised by the program itself and by a timer.
 * A handler does not allocate while the program is in the allocator, as C requires.
 */
#include "truth.h"
#include <sys/mman.h>
#include <sys/time.h>

#define STACK_SIZE 65536
#define FROM_TIMER 50

static volatile sig_atomic_t in_allocator;
static volatile sig_atomic_t timer_hits;

SITE struct block site_program(size_t n)
{
	in_allocator = 1;
	void *p = malloc(n);
	in_allocator = 0;
	return TOOK(p, n);
}
SITE struct block site_raised(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_timer(size_t n) { void *p = malloc(n); return TOOK(p, n); }

static void drop(struct block b)
{
	in_allocator = 1;
	block_free(b);
	in_allocator = 0;
}

static void on_raise(int signal)
{
	(void)signal;
	block_free(site_raised(80));
	site_raised(90);
}

static void on_timer(int signal)
{
	(void)signal;
	if (in_allocator || timer_hits >= FROM_TIMER)
		return;
	timer_hits++;
	block_free(site_timer(110));
	site_timer(120);
}

static void use_stack(void *at)
{
	stack_t stack = { .ss_sp = at, .ss_size = STACK_SIZE };
	REQUIRE(sigaltstack(&stack, NULL) == 0);
}

int main(void)
{
	struct sigaction action = { .sa_flags = SA_ONSTACK | SA_RESTART };
	char above[STACK_SIZE]; /* in main's frame: above every frame that is interrupted */
	void *below = mmap(NULL, STACK_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	REQUIRE(below != MAP_FAILED);
	sigemptyset(&action.sa_mask);
	action.sa_handler = on_raise;
	REQUIRE(sigaction(SIGUSR1, &action, NULL) == 0);
	action.sa_handler = on_timer;
	REQUIRE(sigaction(SIGALRM, &action, NULL) == 0);
	truth_rendezvous("ready");
	for (size_t i = 0; i < 100; i++) {
		use_stack(i % 2 ? (void *)above : below);
		site_program(200 + i);
		raise(SIGUSR1);
		drop(site_program(300 + i));
	}
	struct itimerval each = { { 0, 500 }, { 0, 500 } }, never = { { 0, 0 }, { 0, 0 } };
	REQUIRE(setitimer(ITIMER_REAL, &each, NULL) == 0);
	for (size_t i = 0; timer_hits < FROM_TIMER; i++) {
		drop(site_program(16 + i % 64));
		/* Time outside the allocator in which the timer can fire, however long a traced call takes. */
		for (volatile int idle = 0; idle < 20000; idle++)
			;
	}
	REQUIRE(setitimer(ITIMER_REAL, &never, NULL) == 0);
	truth_rendezvous("done");
	return 0;
}
