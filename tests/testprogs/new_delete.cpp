// Every form of operator new and delete: plain, array, nothrow, aligned, and the sized deletes that inlining allocators implement.
#include "truth.h"
#include <new>

struct alignas(64) Wide {
	char bytes[192];
};
struct Thin {
	char bytes[40];
	~Thin() { bytes[0] = 0; } // an array of these stores its length: new[] requests 8 bytes more
};

// libstdc++ rounds the size of an aligned new up to the alignment before it calls the allocator: sizes are multiples of it here.
static constexpr size_t A = 128;
static constexpr std::align_val_t ALIGN{A};

SITE block early_new(size_t n) { return TOOK(::operator new(n), n); }
SITE block site_new(size_t n) { return TOOK(::operator new(n), n); }
SITE block site_new_array(size_t n) { return TOOK(::operator new[](n), n); }
SITE block site_new_nothrow(size_t n) { return TOOK(::operator new(n, std::nothrow), n); }
SITE block site_new_array_nothrow(size_t n) { return TOOK(::operator new[](n, std::nothrow), n); }
SITE block site_new_aligned(size_t n) { return TOOK(::operator new(n, ALIGN), n); }
SITE block site_new_array_aligned(size_t n) { return TOOK(::operator new[](n, ALIGN), n); }
SITE block site_new_aligned_nothrow(size_t n) { return TOOK(::operator new(n, ALIGN, std::nothrow), n); }
SITE block site_new_array_aligned_nothrow(size_t n) { return TOOK(::operator new[](n, ALIGN, std::nothrow), n); }
SITE block site_new_wide() { return TOOK(new Wide, sizeof(Wide)); }
SITE block site_new_thin_array(size_t n) { return TOOK(new Thin[n], n * sizeof(Thin) + sizeof(size_t)); }

template <typename Delete> static void drop(block b, Delete del)
{
	truth_strike(b);
	del(b.ptr, b.size);
}

int main()
{
	block early[16];
	for (int i = 0; i < 16; i++)
		early[i] = early_new(64 + size_t(i));
	truth_rendezvous("ready");
	for (size_t i = 0; i < 60; i++) {
		drop(site_new(20 + i), [](void *p, size_t) { ::operator delete(p); });
		drop(site_new(20 + i), [](void *p, size_t n) { ::operator delete(p, n); });
		drop(site_new(20 + i), [](void *p, size_t) { ::operator delete(p, std::nothrow); });
		drop(site_new_array(50 + i), [](void *p, size_t) { ::operator delete[](p); });
		drop(site_new_array(50 + i), [](void *p, size_t n) { ::operator delete[](p, n); });
		drop(site_new_array(50 + i), [](void *p, size_t) { ::operator delete[](p, std::nothrow); });
		drop(site_new_nothrow(70 + i), [](void *p, size_t) { ::operator delete(p, std::nothrow); });
		drop(site_new_array_nothrow(70 + i), [](void *p, size_t) { ::operator delete[](p, std::nothrow); });
		drop(site_new_aligned(A + A * i), [](void *p, size_t) { ::operator delete(p, ALIGN); });
		drop(site_new_aligned(A + A * i), [](void *p, size_t n) { ::operator delete(p, n, ALIGN); });
		drop(site_new_array_aligned(2 * A + A * i), [](void *p, size_t) { ::operator delete[](p, ALIGN); });
		drop(site_new_array_aligned(2 * A + A * i), [](void *p, size_t n) { ::operator delete[](p, n, ALIGN); });
		drop(site_new_aligned_nothrow(A), [](void *p, size_t) { ::operator delete(p, ALIGN, std::nothrow); });
		drop(site_new_array_aligned_nothrow(A), [](void *p, size_t) { ::operator delete[](p, ALIGN, std::nothrow); });
		drop(site_new_wide(), [](void *p, size_t) { delete static_cast<Wide *>(p); });
		{
			block b = site_new_thin_array(3);
			truth_strike(b);
			delete[] static_cast<Thin *>(b.ptr);
		}
		site_new(1000 + i);
		site_new_array(2000 + i);
		site_new_nothrow(300 + i);
		site_new_array_nothrow(400 + i);
		site_new_aligned(A * (5 + i));
		site_new_array_aligned(A * (6 + i));
		site_new_aligned_nothrow(A * (7 + i));
		site_new_array_aligned_nothrow(A * (8 + i));
		site_new_wide();
		site_new_thin_array(5);
		if (i < 8)
			drop(early[i], [](void *p, size_t n) { ::operator delete(p, n); });
	}
	::operator delete(nullptr);
	truth_rendezvous("done");
	return 0;
}
