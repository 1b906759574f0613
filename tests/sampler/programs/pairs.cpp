// Nanoseconds of an allocation and its free, 64 to 127 bytes, in a tight loop. Arguments: malloc, new or several (64 live blocks, sizes to
// 4 KiB, freed in a different order than allocated); pairs; and "waits" if it is to begin when its input says so.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <new>

static double now()
{
	timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return double(t.tv_sec) * 1e9 + double(t.tv_nsec);
}

/* The median of many short runs, which is not affected by interruptions of some of them. */
static constexpr long CHUNK = 50000;

static void *blocks[64];
static unsigned long long r = 88172645463325252ull;

static void chunk(char kind)
{
	void *volatile p;

	switch (kind) {
	case 'm': /* malloc */
		for (long i = 0; i < CHUNK; i++) {
			p = malloc(64 + size_t(i & 63));
			free(p);
		}
		return;
	case 'n': /* new */
		for (long i = 0; i < CHUNK; i++) {
			size_t n = 64 + size_t(i & 63);
			p = ::operator new(n);
			::operator delete(p, n);
		}
		return;
	default: /* several */
		for (long i = 0; i < CHUNK; i++) {
			r ^= r << 13, r ^= r >> 7, r ^= r << 17;
			free(blocks[r % 64]);
			blocks[r % 64] = malloc(16 + (r >> 20) % 4080);
		}
	}
}

int main(int argc, char **argv)
{
	static double ns[4096];
	long chunks = atol(argv[2]) / CHUNK;

	if (chunks < 1 || chunks > 4096)
		return 1;
	if (argc > 3) {
		puts("ready");
		fflush(stdout);
		getchar();
	}
	for (long i = 0; i < chunks; i++) {
		double start = now();
		chunk(argv[1][0]);
		ns[i] = (now() - start) / double(CHUNK);
	}
	std::sort(ns, ns + chunks);
	printf("%.3f\n", ns[chunks / 2]);
	return 0;
}
