// The functions of Google's tcmalloc beside those of the C library and C++: with a hint how often a block is used, with the block's size as a
// second result, and by tcmalloc's own names. They are looked up, as tcmalloc is preloaded.
#include "truth.h"
#include <dlfcn.h>
#include <new>

enum hint : unsigned char {};
struct sized {
	void *ptr;
	size_t bytes;
};

static constexpr size_t A = 128;
static constexpr std::align_val_t ALIGN{A};

template <typename Function> static Function find(const char *name)
{
	void *found = dlsym(RTLD_DEFAULT, name);
	REQUIRE(found);
	return reinterpret_cast<Function>(found);
}

static auto new_hot = find<void *(*)(size_t, hint)>("_Znwm12__hot_cold_t");
static auto new_array_hot = find<void *(*)(size_t, hint)>("_Znam12__hot_cold_t");
static auto new_nothrow_hot = find<void *(*)(size_t, const std::nothrow_t &, hint)>("_ZnwmRKSt9nothrow_t12__hot_cold_t");
static auto new_aligned_hot = find<void *(*)(size_t, std::align_val_t, hint)>("_ZnwmSt11align_val_t12__hot_cold_t");
static auto new_sized = find<sized (*)(size_t)>("__size_returning_new");
static auto new_sized_aligned = find<sized (*)(size_t, std::align_val_t)>("__size_returning_new_aligned");
static auto new_sized_hot = find<sized (*)(size_t, hint)>("__size_returning_new_hot_cold");
static auto own_malloc = find<void *(*)(size_t)>("TCMallocInternalMalloc");
static auto own_new_aligned = find<void *(*)(size_t, std::align_val_t, const std::nothrow_t &)>("TCMallocInternalNewAlignedNothrow");
static auto own_delete = find<void (*)(void *, size_t, std::align_val_t)>("TCMallocInternalDeleteSizedAligned");
static auto sdallocx = find<void (*)(void *, size_t, int)>("sdallocx");

SITE block early_new(size_t n) { return TOOK(new_hot(n, hint(0)), n); }
SITE block site_hot(size_t n) { return TOOK(new_hot(n, hint(255)), n); }
SITE block site_cold(size_t n) { return TOOK(new_hot(n, hint(0)), n); }
SITE block site_array_hot(size_t n) { return TOOK(new_array_hot(n, hint(1)), n); }
SITE block site_nothrow_hot(size_t n) { return TOOK(new_nothrow_hot(n, std::nothrow, hint(1)), n); }
SITE block site_aligned_hot(size_t n) { return TOOK(new_aligned_hot(n, ALIGN, hint(1)), n); }
SITE block site_sized(size_t n) { return TOOK(new_sized(n).ptr, n); }
SITE block site_sized_aligned(size_t n) { return TOOK(new_sized_aligned(n, ALIGN).ptr, n); }
SITE block site_sized_hot(size_t n) { return TOOK(new_sized_hot(n, hint(0)).ptr, n); }
SITE block site_own_malloc(size_t n) { return TOOK(own_malloc(n), n); }
SITE block site_own_new(size_t n) { return TOOK(own_new_aligned(n, ALIGN, std::nothrow), n); }

template <typename Delete> static void drop(block b, Delete del)
{
	truth_strike(b);
	del(b.ptr, b.size);
}

int main()
{
	for (size_t i = 0; i < 16; i++)
		early_new(64 + i);
	truth_rendezvous("ready");
	const auto by_delete = [](void *p, size_t) { ::operator delete(p); };
	const auto by_aligned = [](void *p, size_t n) { own_delete(p, n, ALIGN); };
	for (size_t i = 0; i < 60; i++) {
		drop(site_hot(20 + i), by_delete);
		drop(site_cold(20 + i), [](void *p, size_t n) { ::operator delete(p, n); });
		drop(site_array_hot(30 + i), [](void *p, size_t) { ::operator delete[](p); });
		drop(site_nothrow_hot(30 + i), by_delete);
		drop(site_aligned_hot(A + A * i), by_aligned);
		drop(site_sized(40 + i), by_delete);
		drop(site_sized_aligned(A + A * i), by_aligned);
		drop(site_sized_hot(40 + i), by_delete);
		drop(site_own_malloc(50 + i), [](void *p, size_t n) { sdallocx(p, n, 0); });
		drop(site_own_new(A + A * i), by_aligned);
	}
	site_hot(100);
	site_cold(101);
	site_aligned_hot(2 * A);
	site_sized(103);
	site_sized_hot(104);
	site_own_malloc(105);
	site_own_new(3 * A);
	truth_rendezvous("done");
	return 0;
}
