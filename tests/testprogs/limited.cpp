// A program with a limited address space that relies on catching std::bad_alloc, which must also work under a recording. Its C allocations
// are counted as usual; those through operator new may be left out if their return cannot be probed safely. With an argument the limit is
// set only after the recording has begun.
#include "truth.h"
#include <initializer_list>
#include <new>
#include <sys/resource.h>

static volatile size_t beyond_limit = size_t(700) << 20; // less than a GiB, so not treated as suspiciously large

SITE block site_malloc(size_t n) { return TOOK(malloc(n), n); }
SITE block site_new(size_t n) { return TOOK(::operator new(n), n); }
SITE block site_new_array(size_t n) { return TOOK(::operator new[](n), n); }

static void limit_memory()
{
	rlimit limit = {rlim_t(600) << 20, rlim_t(600) << 20};
	REQUIRE(setrlimit(RLIMIT_AS, &limit) == 0);
}

int main(int argc, char **)
{
	bool later = argc > 1;
	if (!later)
		limit_memory();
	try {
		throw 1;
	} catch (int) {
	}
	truth_live_only("site_new");
	truth_live_only("site_new_array");
	truth_rendezvous("ready");
	if (later) {
		limit_memory();
		truth_rendezvous("limited");
	}
	for (size_t i = 0; i < 50; i++) {
		int caught = 0;
		for (auto make : {&site_new, &site_new_array})
			try {
				make(beyond_limit);
			} catch (const std::bad_alloc &) {
				caught++;
			}
		REQUIRE(caught == 2);
		block_free(site_malloc(30 + i));
		site_malloc(40 + i);
		block b = site_new(50);
		truth_strike(b);
		::operator delete(b.ptr);
	}
	truth_rendezvous("done");
	return 0;
}
