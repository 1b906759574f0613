/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * From a pc to its mapping, and from there to the row that covers it and the row's rule: three binary searches in bounded steps.
 */
#ifndef FRAGPROF_UNWIND_LOOKUP_BPF_H
#define FRAGPROF_UNWIND_LOOKUP_BPF_H

#include "unwind_walk.bpf.h"

/* Where a process's mapping table has its struct fp_python; 0 = it has none. */
static __always_inline __u32 fp_python_block(__u32 mm_id)
{
	const struct fp_mappings_header *header;
	__u32 zero = 0;
	void *table;

	table = bpf_map_lookup_elem(&mapping_tables, &mm_id);
	if (!table)
		return 0;
	header = bpf_map_lookup_elem(table, &zero);
	return header ? header->python : 0;
}

/* Finds the mapping of pc and leaves it in walk->mapping. */
static __noinline bool fp_find_mapping(struct fp_walk *walk, __u64 pc)
{
	const struct fp_mappings_header *header;
	const struct fp_mappings *block;
	const struct fp_mapping *mapping;
	__u32 key = 0, low, high, i, at = 0;
	void *table;

	if (!walk)
		return false;
	if (pc - walk->mapping.begin < walk->mapping.end - walk->mapping.begin)
		return true;
	key = walk->mm_id;
	table = bpf_map_lookup_elem(&mapping_tables, &key);
	if (!table)
		return false;
	key = 0;
	header = bpf_map_lookup_elem(table, &key);
	if (!header || !header->mappings || header->mappings > FP_MAPPINGS_MAX)
		return false;

	/* The last block whose first mapping does not begin above pc. */
	low = 1;
	high = (header->mappings + FP_MAPPINGS_PER_BLOCK - 1) / FP_MAPPINGS_PER_BLOCK;
	for (i = 0; i < FP_MAPPING_BLOCK_STEPS; i++) {
		if (low >= high)
			break;
		key = (low + high + 1) / 2;
		block = bpf_map_lookup_elem(table, &key);
		if (!block)
			return false;
		if (block->mapping[0].begin <= pc)
			low = key;
		else
			high = key - 1;
	}
	key = low;
	block = bpf_map_lookup_elem(table, &key);
	if (!block)
		return false;
	/* Unused entries at the end begin at the top of the address space. */
	if (block->mapping[4].begin <= pc)
		at = 4;
	if (block->mapping[(at + 2) & 7].begin <= pc)
		at += 2;
	if (block->mapping[(at + 1) & 7].begin <= pc)
		at += 1;
	mapping = &block->mapping[at & 7];
	if (pc < mapping->begin || pc >= mapping->end)
		return false;
	walk->mapping = *mapping;
	walk->table_ready = 0;
	return true;
}

/* Stores where the parts of the mapping's table are. */
static __always_inline bool fp_open_table(struct fp_walk *walk, void *table)
{
	struct fp_unwind_clock *clock;
	struct fp_table_header *header;
	__u32 zero = 0;

	if (walk->table_ready)
		return true;
	header = bpf_map_lookup_elem(table, &zero);
	if (!header)
		return false;
	walk->first_granule = header->first_granule;
	walk->granules = header->granules;
	walk->rules_block = header->rules_block;
	walk->rows_block = header->rows_block;
	walk->table_ready = 1;
	clock = bpf_map_lookup_elem(&unwind_clock, &zero);
	if (clock && header->last_used != clock->tick)
		header->last_used = clock->tick;
	return true;
}

/* All ones if a < b, else 0; both below 2^63. */
static __always_inline __u64 fp_below(__u64 a, __u64 b)
{
	return (__u64)((__s64)(a - b) >> 63);
}

/* Finds the rule of the file address addr in the mapping's table. FP_END_NONE if there is one. */
static __always_inline __u32 fp_find_rule(struct fp_walk *walk, __u64 addr, struct fp_rule *rule)
{
	const struct fp_index *index;
	const struct fp_rows *rows = NULL;
	const struct fp_rules *rules;
	__u64 granule, pc = addr & 0xffff, at, end, step, id;
	__u32 key = walk->mapping.file, first, next, low, high, i;
	void *table;

	table = bpf_map_lookup_elem(&tables, &key);
	if (!table || !fp_open_table(walk, table))
		return FP_END_NO_TABLE;
	granule = (addr >> FP_GRANULE_SHIFT) - walk->first_granule;
	if (granule >= walk->granules)
		return FP_END_NO_ROW;
	key = 1 + (__u32)granule / FP_INDEX_GRANULES;
	index = bpf_map_lookup_elem(table, &key);
	if (!index)
		return FP_END_NO_ROW;
	i = (__u32)granule % FP_INDEX_GRANULES;
	barrier_var(i); /* or the compiler drops the masks, by which the verifier knows the bounds */
	first = index->first_row[i & (FP_ROWS_PER_BLOCK - 1)];
	next = index->first_row[(i + 1) & (FP_ROWS_PER_BLOCK - 1)];

	if (first < next) {
		/* The last block with a row of this granule that does not lie above pc. */
		low = first / FP_ROWS_PER_BLOCK;
		high = (next - 1) / FP_ROWS_PER_BLOCK;
		for (i = 0; i < FP_ROW_BLOCK_STEPS; i++) {
			__u32 middle = (low + high + 1) / 2;

			if (low >= high)
				break;
			key = walk->rows_block + middle;
			rows = bpf_map_lookup_elem(table, &key);
			if (!rows)
				return FP_END_NO_ROW;
			if (rows->pc[0] <= pc)
				low = middle;
			else
				high = middle - 1;
		}
		key = walk->rows_block + low;
		rows = bpf_map_lookup_elem(table, &key);
		if (!rows)
			return FP_END_NO_ROW;
		at = first / FP_ROWS_PER_BLOCK == low ? first % FP_ROWS_PER_BLOCK : 0;
		end = (next - 1) / FP_ROWS_PER_BLOCK == low ? (next - 1) % FP_ROWS_PER_BLOCK + 1 : FP_ROWS_PER_BLOCK;
		if (rows->pc[at & (FP_ROWS_PER_BLOCK - 1)] > pc)
			rows = NULL; /* only ever the granule's first row */
	}
	if (rows) {
		/* The last row from at to end that does not lie above pc; without branches, which could not be predicted. */
#pragma unroll
		for (step = FP_ROWS_PER_BLOCK / 2; step; step /= 2) {
			__u64 try = at + step;

			at += step & fp_below(try, end) & ~fp_below(pc, rows->pc[try & (FP_ROWS_PER_BLOCK - 1)]);
		}
		id = rows->rule[at & (FP_ROWS_PER_BLOCK - 1)];
	} else {
		/* pc lies before the granule's first row: the row before it continues. */
		if (!first)
			return FP_END_NO_ROW;
		first -= 1;
		key = walk->rows_block + first / FP_ROWS_PER_BLOCK;
		rows = bpf_map_lookup_elem(table, &key);
		if (!rows)
			return FP_END_NO_ROW;
		id = rows->rule[first & (FP_ROWS_PER_BLOCK - 1)];
	}
	if (!id)
		return FP_END_NO_ROW;
	key = walk->rules_block + (__u32)id / FP_RULES_PER_BLOCK;
	rules = bpf_map_lookup_elem(table, &key);
	if (!rules)
		return FP_END_NO_ROW;
	*rule = rules->rule[id & (FP_RULES_PER_BLOCK - 1)];
	return FP_END_NONE;
}

#endif
