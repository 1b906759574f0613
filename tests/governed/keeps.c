/* A program that churns, caches, keeps some seconds and leaks, in blocks of varied content. For C libraries that no packaged program is
 * linked with; its ledger is preloaded. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define CACHED 3000
#define RECENT 800

static uint64_t state = 0x9e3779b97f4a7c15;

static uint64_t next(void)
{
	state ^= state << 13;
	state ^= state >> 7;
	return state ^= state << 17;
}

struct node {
	struct node *older;
	uint64_t id;
	unsigned char text[];
};

__attribute__((noinline)) static struct node *made(size_t bytes)
{
	struct node *node = malloc(sizeof *node + bytes);

	node->older = NULL;
	node->id = next();
	for (size_t i = 0; i + 8 <= bytes; i += 8)
		memcpy(node->text + i, &(uint64_t){next()}, 8);
	return node;
}

__attribute__((noinline)) static struct node *cached(void) { return made(24 + next() % 200); }
__attribute__((noinline)) static struct node *recent(void) { return made(200); }
__attribute__((noinline)) static struct node *leaked(void) { return made(64 + next() % 64); }

int main(void)
{
	static struct node *cache[CACHED], *last[RECENT];
	struct node *leak = NULL;
	unsigned at = 0;

	for (;;) {
		for (int i = 0; i < 40; i++) {
			struct node **slot = &cache[next() % CACHED];

			free(*slot);
			*slot = cached();
			free(made(8 + next() % 300));
		}
		for (int i = 0; i < 2; i++, at++) {
			free(last[at % RECENT]);
			last[at % RECENT] = recent();
		}
		for (int i = 0; i < 8; i++) {
			struct node *node = leaked();

			node->older = leak;
			leak = node;
		}
		nanosleep(&(struct timespec){0, 10000000}, NULL);
	}
}
