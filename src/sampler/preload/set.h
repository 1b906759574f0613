/* The set of live sampled blocks, in which frees are looked up.
 *
 * Three levels. Counters by page reject most frees with 8 KiB of data, which stay in the L1 cache whatever the heap's size, as long as
 * there are few sampled blocks. Counters by address, where neighbours on the heap share cache lines, reject almost all others. Then comes
 * an open hash table whose buckets are one cache line of addresses; an address may be in either of two buckets. There is no chaining and
 * there are no tombstones, so an entry is inserted and removed by one compare-and-swap, and no thread ever waits: it works in signal
 * handlers, after a fork in the middle of an insertion, and from any number of threads.
 *
 * Why one compare-and-swap is enough: an address is inserted before its block is returned to the program and removed before the block is
 * returned to the allocator, so at any time at most one thread works on an address (unless the program frees twice; then one wins). */
#ifndef FRAGPROF_SET_H
#define FRAGPROF_SET_H

#include "platform.h"
#include "site.h"

/* Maximum number of live sampled blocks: 32 GiB of heap at the usual 512 KiB per sample. Also keeps a filter counter within 16 bits. */
#define SET_LIVE_MAX 65535u
/* Addresses per bucket: one cache line. */
#define SET_WAYS 8u
/* Twice the maximum number of live addresses: with two buckets to choose from, both are then full in fewer than 1 in 10^6 cases. */
#define SET_BUCKETS 16384u
/* 4 counters per live address at the maximum, 512 KiB. */
#define FILTER_CELLS 262144u

/* 8 KiB: with 400 sampled blocks, 200 MiB of heap, one free in ten needs the counters by address. */
#define PAGE_CELLS 4096u

/* The sample of a block, to be reported again if a realloc fails. */
struct sampled {
	/* A block of 2^58 bytes or more does not exist. */
	uint64_t size_bytes : 58;
	/* The interval that it was drawn with, as doublings of the finest one. */
	uint64_t doublings : 6;
	/* Sample points in it, times which the interval is its weight. */
	uint64_t points : 52;
	uint64_t site : SITE_BITS;
};

extern uint16_t set_pages[PAGE_CELLS] __attribute__((visibility("hidden")));
extern uint16_t set_filter[FILTER_CELLS] __attribute__((visibility("hidden")));

static inline size_t set_page(const void *pointer)
{
	uintptr_t page = (uintptr_t)pointer >> 12;

	return (page ^ (page >> 12)) & (PAGE_CELLS - 1);
}

/* Addresses of blocks differ by multiples of 16. The upper part is mixed in because large blocks have the same offset in their page. */
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

/* Inserts an address that is not in the set; false if there is no space. */
bool set_insert(void *pointer, struct sampled sampled);
/* Removes the address and returns its sample; false if it is not in the set. */
bool set_remove(void *pointer, struct sampled *sampled);
/* Addresses in the set. */
uint32_t set_live(void);

#endif
