/* The set of live sampled blocks. See set.h. All of it is zero at start: pages that are not used are never allocated. */
#include "set.h"

uint16_t set_pages[PAGE_CELLS] OWN_LINES;
uint16_t set_filter[FILTER_CELLS] OWN_LINES;
/* 1 MiB: searches read only these. They are complements of addresses, so that no search for leaks takes this table for a place from which
 * the program still points to the blocks. */
static uintptr_t addresses[SET_BUCKETS][SET_WAYS] OWN_LINES;
/* 2 MiB: touched only for an address that was found. */
static struct sampled records[SET_BUCKETS][SET_WAYS] OWN_LINES;
static uint32_t live OWN_LINES;

/* Two independent bucket numbers of 14 bits, from the upper half of a multiplication by 2^64 over the golden ratio. */
static void buckets_of(const void *pointer, uint32_t bucket[2])
{
	uint64_t hash = ((uintptr_t)pointer >> 3) * 0x9e3779b97f4a7c15u;

	bucket[0] = (uint32_t)(hash >> 50) & (SET_BUCKETS - 1);
	bucket[1] = (uint32_t)(hash >> 36) & (SET_BUCKETS - 1);
}

/* Never 0. */
static uintptr_t complement(const void *pointer)
{
	return ~(uintptr_t)pointer;
}

static void count(const void *pointer)
{
	__atomic_add_fetch(&set_pages[set_page(pointer)], 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&set_filter[set_cell(pointer)], 1, __ATOMIC_RELAXED);
}

static void discount(const void *pointer)
{
	__atomic_sub_fetch(&set_filter[set_cell(pointer)], 1, __ATOMIC_RELAXED);
	__atomic_sub_fetch(&set_pages[set_page(pointer)], 1, __ATOMIC_RELAXED);
}

static bool claim(uint32_t bucket, void *pointer, struct sampled sampled)
{
	for (uint32_t way = 0; way < SET_WAYS; way++) {
		uintptr_t expected = 0;

		if (__atomic_load_n(&addresses[bucket][way], __ATOMIC_RELAXED) != 0)
			continue;
		if (!__atomic_compare_exchange_n(&addresses[bucket][way], &expected, complement(pointer), false, __ATOMIC_ACQ_REL,
						 __ATOMIC_RELAXED))
			continue;
		/* The address is not looked up before the program knows it. */
		records[bucket][way] = sampled;
		return true;
	}
	return false;
}

static uint32_t used_ways(uint32_t bucket)
{
	uint32_t used = 0;

	for (uint32_t way = 0; way < SET_WAYS; way++)
		used += __atomic_load_n(&addresses[bucket][way], __ATOMIC_RELAXED) != 0;
	return used;
}

bool set_insert(void *pointer, struct sampled sampled)
{
	uint32_t bucket[2];

	if (__atomic_add_fetch(&live, 1, __ATOMIC_RELAXED) > SET_LIVE_MAX)
		goto full;
	/* Before the address is in the table: a filter that says no must be right. */
	count(pointer);
	buckets_of(pointer, bucket);
	/* The emptier of the two, which keeps buckets from filling up. */
	uint32_t first = used_ways(bucket[0]) <= used_ways(bucket[1]) ? 0 : 1;
	if (claim(bucket[first], pointer, sampled) || claim(bucket[1 - first], pointer, sampled))
		return true;
	discount(pointer);
full:
	__atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
	return false;
}

bool set_remove(void *pointer, struct sampled *sampled)
{
	uint32_t bucket[2];

	if (pointer == NULL)
		return false;
	buckets_of(pointer, bucket);
	for (uint32_t i = 0; i < 2; i++) {
		for (uint32_t way = 0; way < SET_WAYS; way++) {
			uintptr_t expected = complement(pointer);
			struct sampled found;

			if (__atomic_load_n(&addresses[bucket[i]][way], __ATOMIC_ACQUIRE) != expected)
				continue;
			/* Before the swap: after it, another block may use the entry. */
			found = records[bucket[i]][way];
			if (!__atomic_compare_exchange_n(&addresses[bucket[i]][way], &expected, 0, false, __ATOMIC_ACQ_REL,
							 __ATOMIC_RELAXED))
				return false;
			*sampled = found;
			discount(pointer);
			__atomic_sub_fetch(&live, 1, __ATOMIC_RELAXED);
			return true;
		}
	}
	return false;
}

uint32_t set_live(void)
{
	return __atomic_load_n(&live, __ATOMIC_RELAXED);
}
