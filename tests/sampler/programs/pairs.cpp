// Nanoseconds of an allocation and its free, 64 to 127 bytes, in a tight loop. Arguments: malloc, new or mixed (64 live blocks, sizes to
// 4 KiB, freed in another order than made); pairs.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <new>

static double now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return double(t.tv_sec) * 1e9 + double(t.tv_nsec);
}

int main(int, char **argv)
{
	const char *what = argv[1];
	long pairs = atol(argv[2]);
	void *volatile p;
	double start = now();

	if (!strcmp(what, "malloc")) {
		for (long i = 0; i < pairs; i++) {
			p = malloc(64 + size_t(i & 63));
			free(p);
		}
	} else if (!strcmp(what, "new")) {
		for (long i = 0; i < pairs; i++) {
			size_t n = 64 + size_t(i & 63);
			p = ::operator new(n);
			::operator delete(p, n);
		}
	} else {
		static void *blocks[64];
		unsigned long long r = 88172645463325252ull;
		for (long i = 0; i < pairs; i++) {
			r ^= r << 13, r ^= r >> 7, r ^= r << 17;
			free(blocks[r % 64]);
			blocks[r % 64] = malloc(16 + (r >> 20) % 4080);
		}
	}
	printf("%.3f\n", (now() - start) / double(pairs));
	return 0;
}
