/* The set of live sampled blocks, in which frees are looked up.
 *
 * Three levels. Counters by page answer most frees with "not one of ours" from 8 KiB, which stay in the first cache whatever the heap's
 * size, as long as sampled blocks are few. Counters by address, of which neighbours on the heap share cache lines, answer almost all the
 * others. Behind them, an open hash table whose buckets are one cache line of addresses; an address may be in either of
 * two buckets. There is no chaining and there are no tombstones, so an entry is inserted and removed by one compare-and-swap and
 * nobody ever waits: it works in signal handlers, after a fork in the middle of an insertion, and from any number of threads.
 *
 * Why one compare-and-swap is enough: an address is inserted before its block is handed to the program and removed before the block is
 * returned to the allocator, so at any time one thread at most works on one address (unless the program frees twice, when one wins). */
#ifndef FRAGPROF_SET_H
#define FRAGPROF_SET_H

#include "platform.h"

/* Sampled blocks that can live at once: 32 GiB of heap at the usual 512 KiB a sample. Also keeps a filter counter within 16 bits. */
#define SET_LIVE_MAX 65535u
/* Addresses a bucket: one cache line of them. */
#define SET_WAYS 8u
/* Twice the addresses that live at most: with two buckets to choose from, one that finds both full is then rarer than 1 in 10^6. */
#define SET_BUCKETS 16384u
/* 4 counters for each address that lives at most, 512 KiB. */
#define FILTER_CELLS 262144u

/* 8 KiB: with 400 sampled blocks, 200 MiB of heap, one free in ten goes on to the counters by address. */
#define PAGE_CELLS 4096u

/* The sample of a block, to be reported again if a realloc fails. */
struct sampled {
	/* A block of 2^58 bytes or more does not exist. */
	uint64_t size_bytes : 58;
	/* The interval that it was drawn with, as doublings of the usual one. */
	uint64_t doublings : 6;
	uint64_t weight_bytes;
};

extern uint16_t set_pages[PAGE_CELLS] __attribute__((visibility("hidden")));
extern uint16_t set_filter[FILTER_CELLS] __attribute__((visibility("hidden")));

static inline size_t set_page(const void *pointer)
{
	uintptr_t page = (uintptr_t)pointer >> 12;

	return (page ^ (page >> 12)) & (PAGE_CELLS - 1);
}

/* Blocks are multiples of 16 apart. The upper part is folded in because large blocks are all at one offset in their page. */
static inline size_t set_cell(const void *pointer)
{
	uintptr_t address = (uintptr_t)pointer;

	return ((address >> 4) ^ (address >> 22)) & (FILTER_CELLS - 1);
}

/* False only if the address is not in the set. */
static inline bool set_may_hold(const void *pointer)
{
	return unlikely(__atomic_load_n(&set_pages[set_page(pointer)], __ATOMIC_RELAXED) != 0) &&
	       unlikely(__atomic_load_n(&set_filter[set_cell(pointer)], __ATOMIC_RELAXED) != 0);
}

/* Puts the address in; false if there is no room. */
bool set_insert(void *pointer, struct sampled sampled);
/* Removes the address and returns its sample; false if it is not in the set. */
bool set_remove(void *pointer, struct sampled *sampled);
/* Addresses in the set. */
uint32_t set_live(void);

#endif
