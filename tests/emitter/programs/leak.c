/* Churn with a leak: arguments are MiB to allocate in all and the share of them that leaks. A constant 16 MiB is live at other sites. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define SITE __attribute__((noinline, noclone)) static

SITE void *site_leak(size_t size)
{
	void *volatile block = malloc(size);
	return block;
}

SITE void *site_cache(size_t size)
{
	void *volatile block = malloc(size);
	return block;
}

SITE void *site_request(size_t size)
{
	void *volatile block = malloc(size);
	return block;
}

#define CACHED 2048
#define REQUESTS 1024

int main(int argc, char **argv)
{
	static void *cache[CACHED], *requests[REQUESTS];
	size_t all = (size_t)(argc > 1 ? atol(argv[1]) : 100) << 20, done = 0, leaked = 0;
	double share = argc > 2 ? atof(argv[2]) : 0.001;
	char command;

	puts("ready");
	fflush(stdout);
	if (read(0, &command, 1) != 1)
		return 1;
	for (size_t i = 0; done < all; i++) {
		size_t size = 256 + (i * 2654435761u) % 1024;

		free(requests[i % REQUESTS]);
		requests[i % REQUESTS] = site_request(size);
		done += size;
		if (i % 64 == 0) {
			free(cache[i / 64 % CACHED]);
			cache[i / 64 % CACHED] = site_cache(512);
			done += 512;
		}
		if ((double)leaked < share * (double)done) {
			site_leak(200);
			leaked += 200;
		}
	}
	printf("leaked %zu of %zu\n", leaked, done);
	fflush(stdout);
	return read(0, &command, 1) < 0;
}
