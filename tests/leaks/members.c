/* Blocks that are reachable through members, arrays and other blocks, and from a local variable of main. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct shelf {
	char name[24];
	struct shelf *next;
	void **goods;
};
struct shop {
	int number;
	struct {
		long count;
		struct shelf *first;
	} shelves[3];
};
struct shop the_shop;

struct counter {
	long reads;
	void **table;
};

static void **table(int entries)
{
	void **table = calloc(entries, sizeof *table);
	for (int i = 0; i < entries; i++) {
		table[i] = malloc(200);
		memset(table[i], 1, 200);
	}
	return table;
}

static __attribute__((noinline)) void build(void)
{
	struct shelf *first = calloc(1, sizeof *first), *second = calloc(1, sizeof *second);
	first->next = second;
	second->goods = malloc(sizeof(void *));
	second->goods[0] = table(5000);
	the_shop.shelves[1].first = first;
}

static __attribute__((noinline)) void count(struct counter *counter)
{
	counter->table = table(3000);
}

int main(void)
{
	struct counter counter = { 0 };
	build();
	count(&counter);
	puts("ready");
	fflush(stdout);
	for (;;) {
		pause();
		count(&counter);
	}
}
