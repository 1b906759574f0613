/* The functions of snmalloc by which Rust programs allocate, with their names and arguments, and another allocator behind them. `make
 * allocator-matrix` has a Rust program on snmalloc itself. */
#include "truth.h"

#define OWN __attribute__((noipa, visibility("default")))

static char memory[32 << 20] __attribute__((aligned(4096)));
static size_t used;

/* Never given back: the addresses do not matter here. */
static void *take(size_t alignment, size_t size)
{
	uintptr_t at = ((uintptr_t)memory + used + alignment - 1) & ~(uintptr_t)(alignment - 1);
	used = at + size - (uintptr_t)memory;
	return used <= sizeof memory ? (void *)at : NULL;
}

OWN void *sn_rust_alloc(size_t alignment, size_t size) { return take(alignment, size); }
OWN void *sn_rust_alloc_zeroed(size_t alignment, size_t size) { return take(alignment, size); }
OWN void sn_rust_dealloc(void *ptr, size_t alignment, size_t size)
{
	(void)alignment;
	memset(ptr, 0, size);
}
OWN void *sn_rust_realloc(void *ptr, size_t alignment, size_t old_size, size_t new_size)
{
	void *p = new_size <= old_size ? ptr : take(alignment, new_size);
	if (p && p != ptr)
		memcpy(p, ptr, old_size);
	return p;
}

SITE struct block site_sn_rust_alloc(size_t n) { void *p = sn_rust_alloc(16, n); return TOOK(p, n); }
SITE struct block site_sn_rust_alloc_zeroed(size_t n) { void *p = sn_rust_alloc_zeroed(64, n); return TOOK(p, n); }
SITE struct block site_sn_rust_realloc(struct block old, size_t n)
{
	truth_strike(old);
	void *p = sn_rust_realloc(old.ptr, 16, old.size, n);
	return TOOK(p, n);
}

int main(void)
{
	truth_rendezvous("ready");
	for (size_t i = 0; i < 100; i++) {
		struct block a = site_sn_rust_alloc(40 + i), b = site_sn_rust_alloc_zeroed(500 + i);
		site_sn_rust_alloc(70);
		b = site_sn_rust_realloc(b, i % 2 ? 3000 : 100);
		if (i % 3 == 0)
			continue;
		truth_strike(a);
		sn_rust_dealloc(a.ptr, 16, a.size);
		truth_strike(b);
		sn_rust_dealloc(b.ptr, 16, b.size);
	}
	truth_rendezvous("done");
	return 0;
}
