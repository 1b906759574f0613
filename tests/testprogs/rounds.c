/* Allocates, resizes and frees in rounds, each started by the test; prints its ledger after each. For long recordings.
 * With TRUTH_FLUSH in the environment it first flushes the thread's cache, if its allocator has a call for that; with TRUTH_PACE it
 * sleeps for a millisecond after every ten blocks. */
#include "truth.h"

#ifndef TRUTH_STATIC
#include <dlfcn.h>

static void flush_caches(void)
{
	int (*mallctl)(const char *, void *, size_t *, void *, size_t) =
		(int (*)(const char *, void *, size_t *, void *, size_t))dlsym(RTLD_DEFAULT, "mallctl");
	void (*mark_idle)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "MallocExtension_MarkThreadIdle");

	if (mallctl)
		mallctl("thread.tcache.flush", NULL, NULL, NULL, 0);
	if (mark_idle)
		mark_idle();
}
#else
static void flush_caches(void) {}
#endif

#define KEPT 4096

SITE struct block site_round(size_t n) { void *p = malloc(n); return TOOK(p, n); }
SITE struct block site_zeroed(size_t n) { void *p = calloc(1, n); return TOOK(p, n); }

int main(void)
{
	static struct block kept[KEPT];
	uint64_t random = 88172645463325252ULL;
	int paced = getenv("TRUTH_PACE") != NULL;

	truth_rendezvous("ready");
	for (;;) {
		for (int i = 0; i < 20000; i++) {
			random ^= random << 13;
			random ^= random >> 7;
			random ^= random << 17;
			struct block *b = &kept[random % KEPT];
			block_free(*b);
			*b = random & (1 << 20) ? site_zeroed(1 + (random >> 24) % 5000) : site_round(1 + (random >> 24) % 300);
			if (paced && i % 10 == 0)
				usleep(1000);
		}
		if (getenv("TRUTH_FLUSH"))
			flush_caches();
		truth_rendezvous("round");
	}
}
