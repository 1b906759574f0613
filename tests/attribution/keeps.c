/*
 * Keeps one of 64 small blocks, from one of several stacks, and computes what they pin from its own addresses.
 *
 * Reads commands, answers each with one line of JSON:
 *   fill      many small blocks from four sites; all but every 64th are freed
 *   release   frees the kept ones
 *   drop      frees the large block
 *   trim      malloc_trim(0)
 *   churn     allocates and frees as fast as it can, keeps 100
 */
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SITE __attribute__((noipa))

enum { BLOCKS = 64000, BLOCK_BYTES = 200, EVERY = 64, EARLY = 1000, EARLY_FREED = 100, PAGE = 4096 };

static char *blocks[BLOCKS];
static char *early[EARLY];
static char *churned[100];
static char *large;

static char *touched(size_t bytes)
{
	char *block = malloc(bytes);
	if (!block)
		abort();
	memset(block, 1, bytes);
	return block;
}

SITE static char *site_keeper(void) { char *block = touched(BLOCK_BYTES); __asm__ volatile("" ::: "memory"); return block; }
SITE static char *site_passing_a(void) { char *block = touched(BLOCK_BYTES); __asm__ volatile("" ::: "memory"); return block; }
SITE static char *site_passing_b(void) { char *block = touched(BLOCK_BYTES); __asm__ volatile("" ::: "memory"); return block; }
SITE static char *site_large(void) { char *block = touched(20 << 20); __asm__ volatile("" ::: "memory"); return block; }
SITE static char *site_churn(size_t bytes) { char *block = touched(bytes); __asm__ volatile("" ::: "memory"); return block; }
SITE static char *early_block(void) { char *block = touched(1000); __asm__ volatile("" ::: "memory"); return block; }

/* Bytes of a chunk of glibc's around a block: its header is before it, its last word is the next chunk's. */
static size_t chunk_bytes(char *block) { return malloc_usable_size(block) + 8; }

/* What the kept blocks pin: on each page with a kept chunk, the bytes that are of none. */
static void fill(void)
{
	size_t pinned = 0, live = 0, on_page = 0;
	uintptr_t page = 0;
	large = site_large();
	for (int i = 0; i < BLOCKS; i++)
		blocks[i] = i % EVERY == EVERY / 2 ? site_keeper() : i % 2 ? site_passing_a() : site_passing_b();
	for (int i = 0; i < BLOCKS; i++)
		if (i % EVERY != EVERY / 2)
			free(blocks[i]);
	for (int i = EVERY / 2; i < BLOCKS; i += EVERY) {
		uintptr_t start = (uintptr_t)blocks[i] - 16, end = start + chunk_bytes(blocks[i]);
		live += end - start;
		while (start < end) {
			uintptr_t stop = start / PAGE * PAGE + PAGE;
			if (stop > end)
				stop = end;
			if (start / PAGE != page) {
				pinned += on_page ? PAGE - on_page : 0;
				on_page = 0;
				page = start / PAGE;
			}
			on_page += stop - start;
			start = stop;
		}
	}
	pinned += on_page ? PAGE - on_page : 0;
	for (int i = 0; i < EARLY_FREED; i++)
		free(early[i]);
	printf("{\"pinned_bytes\": %zu, \"kept_chunk_bytes\": %zu, \"kept\": %d, \"large_bytes\": %zu}\n", pinned, live, BLOCKS / EVERY,
	       chunk_bytes(large));
}

static void release(void)
{
	for (int i = EVERY / 2; i < BLOCKS; i += EVERY)
		free(blocks[i]);
	printf("{}\n");
}

static void churn(void)
{
	static char *ring[4096];
	for (int i = 0; i < 400000; i++) {
		char **slot = &ring[(unsigned)i * 2654435761u >> 20];
		free(*slot);
		*slot = site_churn(16 + (size_t)i % 500);
	}
	for (int i = 0; i < 4096; i++)
		free(ring[i]);
	for (int i = 0; i < 100; i++)
		churned[i] = site_churn(3000);
	printf("{\"live\": 100}\n");
}

int main(void)
{
	static char line[64], out[4096];
	setvbuf(stdout, out, _IOFBF, sizeof out);
	for (int i = 0; i < EARLY; i++)
		early[i] = early_block();
	printf("{\"early\": %d, \"early_chunk_bytes\": %zu}\n", EARLY - EARLY_FREED, chunk_bytes(early[0]));
	fflush(stdout);
	while (fgets(line, sizeof line, stdin)) {
		if (strncmp(line, "fill", 4) == 0)
			fill();
		else if (strncmp(line, "release", 7) == 0)
			release();
		else if (strncmp(line, "drop", 4) == 0)
			free(large), large = NULL, printf("{}\n");
		else if (strncmp(line, "trim", 4) == 0)
			printf("{\"trimmed\": %d}\n", malloc_trim(0));
		else if (strncmp(line, "churn", 5) == 0)
			churn();
		fflush(stdout);
	}
	return 0;
}
