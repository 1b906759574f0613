// A program that replaces operator new and delete by calls of malloc and free, as many do: each block counts once.
#include "truth.h"
#include <new>

void *operator new(size_t n)
{
	void *p = malloc(n);
	if (!p)
		throw std::bad_alloc();
	return p;
}
void operator delete(void *p) noexcept { free(p); }
void operator delete(void *p, size_t) noexcept { free(p); }

SITE block site_new(size_t n) { return TOOK(::operator new(n), n); }
SITE block site_new_array(size_t n) { return TOOK(::operator new[](n), n); }
SITE block site_malloc(size_t n) { return TOOK(malloc(n), n); }

int main()
{
	truth_rendezvous("ready");
	for (size_t i = 0; i < 100; i++) {
		block b = site_new(30 + i);
		truth_strike(b);
		::operator delete(b.ptr);
		b = site_new_array(60 + i);
		truth_strike(b);
		::operator delete[](b.ptr);
		// Mixes the two families, which the replacement allows.
		block_free(site_new(10));
		b = site_malloc(90);
		truth_strike(b);
		::operator delete(b.ptr, b.size);
		site_new(100 + i);
		site_new_array(200 + i);
		site_malloc(300 + i);
	}
	truth_rendezvous("done");
	return 0;
}
