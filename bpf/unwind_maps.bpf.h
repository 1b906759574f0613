/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The unwinder's maps, each with the reason for its size and why it is safe.
 */
#ifndef FRAGPROF_UNWIND_MAPS_BPF_H
#define FRAGPROF_UNWIND_MAPS_BPF_H

#include "maps.bpf.h"
#include "unwind_table.h"

/* The inner type of `tables` and `mapping_tables`: blocks of 256 bytes, as many as needed, filled by the daemon through mmap. Sizes rather
 * than types: from 5.15 to 6.1 the kernel refuses an inner map made without type information, as the daemon makes them, where this
 * template has some (bpf_map_meta_equal compares timer_off, whose value for "none" differs with and without types). */
struct blocks {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE | BPF_F_INNER_MAP);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct fp_block));
};

/* Unwind tables by file number. A table is complete before its entry is set, and its memory outlives the entry by an RCU grace
 * period, so a walk sees all of it or nothing. File numbers are assigned in turn, so a number seen a moment ago is not another
 * file's now. 64 KiB. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, FP_FILES_MAX);
	__type(key, __u32);
	__array(values, struct blocks);
} tables SEC(".maps");

/* Executable mappings by address space. Replaced as a whole when they change. As many as watched processes. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH_OF_MAPS);
	__uint(max_entries, FP_TARGETS_MAX);
	__type(key, __u32);
	__array(values, struct blocks);
} mapping_tables SEC(".maps");

/* One row. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fp_unwind_clock);
} unwind_clock SEC(".maps");

#endif
