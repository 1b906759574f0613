// Calls of operator new that never return: an exception, a longjmp, a thread that ends inside. And new-handlers that free, allocate
// and take a signal on another stack while operator new is open. After each, the thread's ordinary allocations must still be seen.
#include "truth.h"
#include <initializer_list>
#include <new>
#include <pthread.h>
#include <setjmp.h>

static volatile size_t huge = size_t(PTRDIFF_MAX) - (1 << 20);
static jmp_buf way_out;
static block reserve;
static int handler_calls;

SITE block site_ordinary(size_t n) { return TOOK(::operator new(n), n); }
SITE block site_reserve(size_t n) { return TOOK(malloc(n), n); }
SITE block site_in_handler(size_t n) { return TOOK(malloc(n), n); }
SITE block site_in_signal(size_t n) { return TOOK(malloc(n), n); }
SITE block site_thread(size_t n) { return TOOK(::operator new(n), n); }
SITE void site_throws(size_t n) { TOOK(::operator new(n), n); }
SITE void site_throws_array(size_t n) { TOOK(::operator new[](n), n); }
SITE void site_throws_aligned(size_t n) { TOOK(::operator new(n, std::align_val_t{64}), n); }
SITE void *site_returns_null(size_t n) { return TOOK(::operator new(n, std::nothrow), n).ptr; }
SITE void site_jumps_out(size_t n) { TOOK(::operator new(n), n); }
SITE block site_below_a_hole(size_t n) { return TOOK(::operator new(n), n); }

// Calls FAIL further down the stack. What it leaves there is in the middle of the unused part of the next such frame.
SITE void far_down(void (*fail)(size_t), size_t n)
{
	volatile char pad[1024];
	pad[0] = 1;
	fail(n);
	(void)pad[0];
}

// Allocates from below a large frame that is never written to: a call that was left by an exception or a longjmp still has its return
// address there, and must not be mistaken for one that is still open.
SITE void over_a_hole(size_t n)
{
	volatile char hole[8192];
	hole[0] = 1;
	block b = site_below_a_hole(n);
	truth_strike(b);
	::operator delete(b.ptr);
	site_below_a_hole(n + 1);
	(void)hole[0];
}

struct Refuses {
	char bytes[333];
	Refuses() { throw 1; }
};
SITE void site_constructor_throws() { TOOK(new Refuses, sizeof(Refuses)); }

static void drop(block b)
{
	truth_strike(b);
	::operator delete(b.ptr);
}

static void ordinary(size_t i)
{
	drop(site_ordinary(40 + i));
	site_ordinary(60 + i);
}

static void jump() { longjmp(way_out, 1); }
static void end_thread() { pthread_exit(nullptr); }

// Frees the reserve at its first call, as a new-handler should; the memory is still not sufficient, so then it gives up.
static void free_reserve()
{
	if (handler_calls++)
		throw std::bad_alloc();
	block_free(reserve);
}

static void allocate_in_handler()
{
	site_in_handler(55);
	block_free(site_in_handler(66));
	throw std::bad_alloc();
}

static void signal_in_handler()
{
	raise(SIGUSR1);
	throw std::bad_alloc();
}

static void on_signal(int)
{
	site_in_signal(77);
	block_free(site_in_signal(88));
}

static void *thread_that_ends_inside(void *)
{
	site_thread(100);
	site_jumps_out(huge);
	return nullptr;
}

static void *thread_that_just_ends(void *)
{
	pthread_exit(nullptr);
}

int main()
{
	static char alternate[1 << 16];
	stack_t stack = {};
	stack.ss_sp = alternate;
	stack.ss_size = sizeof alternate;
	REQUIRE(sigaltstack(&stack, nullptr) == 0);
	struct sigaction action = {};
	action.sa_handler = on_signal;
	action.sa_flags = SA_ONSTACK;
	REQUIRE(sigaction(SIGUSR1, &action, nullptr) == 0);
	// The first exception and the first thread that ends in this way load unwind tables, so both happen before the recording.
	try {
		throw 1;
	} catch (int) {
	}
	pthread_t first;
	REQUIRE(pthread_create(&first, nullptr, thread_that_just_ends, nullptr) == 0);
	pthread_join(first, nullptr);
	// The exception itself is allocated by the site that throws.
	for (const char *site : {"site_throws", "site_throws_array", "site_throws_aligned", "site_returns_null", "site_constructor_throws"})
		truth_live_only(site);
	truth_rendezvous("ready");
	for (volatile size_t i = 0; i < 40; i = i + 1) {
		volatile int caught = 0; // volatile because of longjmp
		ordinary(i);
		for (auto throws : {site_throws, site_throws_array, site_throws_aligned})
			try {
				far_down(throws, huge);
			} catch (const std::bad_alloc &) {
				over_a_hole(700 + i);
				caught = caught + 1;
				ordinary(i);
			}
		REQUIRE(caught == 3);
		REQUIRE(!site_returns_null(huge));
		ordinary(i);
		try {
			site_constructor_throws();
		} catch (int) {
			ordinary(i);
		}
		std::set_new_handler(jump);
		if (setjmp(way_out) == 0) {
			far_down(site_jumps_out, huge);
			truth_fail("huge succeeded");
		}
		over_a_hole(800 + i);
		ordinary(i);
		reserve = site_reserve(5000 + i);
		handler_calls = 0;
		for (auto handler : {free_reserve, allocate_in_handler, signal_in_handler}) {
			std::set_new_handler(handler);
			try {
				site_throws(huge);
			} catch (const std::bad_alloc &) {
				caught = caught + 1;
			}
			ordinary(i);
		}
		REQUIRE(caught == 6);
		std::set_new_handler(end_thread);
		pthread_t thread;
		REQUIRE(pthread_create(&thread, nullptr, thread_that_ends_inside, nullptr) == 0);
		pthread_join(thread, nullptr);
		std::set_new_handler(nullptr);
		ordinary(i);
	}
	truth_rendezvous("done");
	return 0;
}
