/* An open hash table, from which nothing is removed. See stacks.h. Pages that are not used are never allocated. */
#include "stacks.h"

#include "system.h"

/* 8 MiB: the daemon keeps as many stacks of a process. */
#define STACKS_BITS 20
/* A search ends after so many entries: the table is nearly full. */
#define STEPS_MAX 64u

static uint64_t hashes[1u << STACKS_BITS] __attribute__((aligned(4096)));
static uint8_t sent[1u << STACKS_BITS] __attribute__((aligned(4096)));

uint32_t stacks_number(uint64_t hash, bool *is_sent)
{
	uint32_t at = (uint32_t)(hash >> (64 - STACKS_BITS));

	for (uint32_t step = 0; step < STEPS_MAX; step++, at = (at + 1) & ((1u << STACKS_BITS) - 1)) {
		uint64_t found = __atomic_load_n(&hashes[at], __ATOMIC_RELAXED);

		if (found == 0 && __atomic_compare_exchange_n(&hashes[at], &found, hash, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
			found = hash;
		if (found != hash)
			continue;
		*is_sent = __atomic_load_n(&sent[at], __ATOMIC_RELAXED) != 0;
		return at + 1;
	}
	*is_sent = false;
	return 0;
}

void stacks_set_sent(uint32_t number)
{
	__atomic_store_n(&sent[number - 1], 1, __ATOMIC_RELAXED);
}

void stacks_forget(void)
{
	/* Zeros, without touching what was not used. */
	system_call(CALL_MADVISE, (long)hashes, sizeof hashes, MADV_DONTNEED_, 0, 0, 0);
	system_call(CALL_MADVISE, (long)sent, sizeof sent, MADV_DONTNEED_, 0, 0, 0);
}
