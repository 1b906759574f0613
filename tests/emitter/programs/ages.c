/* A heap with a history: keeps blocks from before a command, frees some of them, keeps others allocated since, at sites of their own, and
 * prints the live bytes by site. Arguments: MiB kept from before, MiB kept since. Commands as in foreign.c; on "g" it allocates and prints
 * "ledger SITE BYTES ..." and mallinfo2's value. On "f" it forks a child that allocates and frees, and waits for it. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define SITE __attribute__((noinline, noclone)) static

struct kept {
	void **blocks;
	size_t count, bytes;
};

SITE void *site_before(size_t size)
{
	void *block = malloc(size);

	memset(block, 1, size);
	return block;
}

SITE void *site_small(size_t size)
{
	void *block = malloc(size);

	memset(block, 2, size);
	return block;
}

SITE void *site_large(size_t size)
{
	void *block = malloc(size);

	memset(block, 3, size);
	return block;
}

SITE void *site_churn(size_t size)
{
	return malloc(size);
}

static struct kept fill(void *(*site)(size_t), size_t bytes, size_t size)
{
	struct kept kept = { malloc(bytes / size * sizeof(void *)), 0, 0 };

	for (; kept.count < bytes / size; kept.count++) {
		kept.blocks[kept.count] = site(size);
		kept.bytes += size;
		for (int i = 0; i < 3; i++)
			free(site_churn(size));
	}
	return kept;
}

int main(int argc, char **argv)
{
	size_t before_mib = argc > 1 ? (size_t)atol(argv[1]) : 32, since_mib = argc > 2 ? (size_t)atol(argv[2]) : 32;
	struct kept before = fill(site_before, before_mib << 20, 240);
	char command;

	printf("ready\n");
	fflush(stdout);
	while (read(0, &command, 1) == 1) {
		if (command == 'f') {
			pid_t child = fork();

			if (child == 0) {
				struct kept kept = fill(site_small, 4 << 20, 1000);

				for (size_t i = 0; i < kept.count; i++)
					free(kept.blocks[i]);
				_exit(0);
			}
			int status = 0;
			waitpid(child, &status, 0);
			printf("child %d\n", status);
			fflush(stdout);
			continue;
		}
		/* Every other block from before is freed, and others are allocated in its place. */
		for (size_t i = 0; i < before.count; i += 2) {
			free(before.blocks[i]);
			before.bytes -= 240;
		}
		struct kept small = fill(site_small, (since_mib << 20) / 4, 240);
		struct kept large = fill(site_large, (since_mib << 20) / 4 * 3, 6000);
		struct mallinfo2 info = mallinfo2();

		printf("ledger site_before %zu site_small %zu site_large %zu mallinfo2 %zu\n", before.bytes, small.bytes, large.bytes,
		       info.uordblks + info.hblkhd);
		fflush(stdout);
	}
	return 0;
}
