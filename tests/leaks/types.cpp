// Objects with virtual tables, which identify their types: some are dropped, others are kept with a pointer to each.
#include <cstdio>
#include <unistd.h>
#include <vector>

namespace cache {
struct Entry {
	virtual ~Entry() = default;
	long key = 7;
};
struct TextEntry : Entry {
	char text[48] = "some text";
};
struct ImageEntry : Entry {
	char *pixels = new char[3000]();
};
} // namespace cache

std::vector<cache::Entry *> kept;

static void __attribute__((noinline)) make()
{
	for (int i = 0; i < 300; i++) {
		kept.push_back(new cache::TextEntry);
		cache::Entry *volatile dropped = new cache::TextEntry;
		dropped = new cache::ImageEntry;
		dropped = nullptr;
	}
}

int main()
{
	make();
	volatile char stack[65536];
	for (char volatile &byte : stack)
		byte = 0;
	puts("ready");
	fflush(stdout);
	pause();
}
