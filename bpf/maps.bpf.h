/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Every map except the unwinder's (unwind_maps.bpf.h), each with the reason for its size and why it is safe; and the two things that every
 * program does with them: count, and send a record.
 */
#ifndef FRAGPROF_MAPS_BPF_H
#define FRAGPROF_MAPS_BPF_H

#include "vmlinux.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "fragprof.h"
#include "kernel.bpf.h"

/* Watched processes, by slot. The daemon writes a row before it attaches the first probe that names the slot and raises the
 * generation when the slot gets a new owner; programs only add to the loss counts. Mapped by the daemon, so that it can switch a target
 * on and off by one store while the counts continue. Lookup is inlined: 2 ns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, FP_TARGETS_MAX);
	__type(key, __u32);
	__type(value, struct fp_target);
} targets SEC(".maps");

/* tgid -> slots, for the programs that run for every process of the machine (system calls, life cycle). An entry is replaced as a whole. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, FP_TARGETS_MAX);
	__type(key, __u32);
	__type(value, struct fp_slots);
} slots_of_tgid SEC(".maps");

/* The inner type of `rings`; its size is set by the daemon for each ring that it creates, and is here that of the largest page. */
struct ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 65536);
};

/* Ring buffers by shard. A target's row names its shard, so its records keep their order. The daemon enters a ring before the first target
 * that names it, and removes it after the last. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, FP_SHARDS_MAX);
	__type(key, __u32);
	__array(values, struct ring);
} rings SEC(".maps");

/* Stack definitions already sent, by hash mixed with slot and generation. An evicted entry costs a second definition, which the daemon
 * ignores. 128 Ki stacks x ~72 B = 9 MiB at most; allocated as needed. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 131072);
	__type(key, __u64);
	__type(value, __u8);
} stacks_sent SEC(".maps");

/* The counters, a row for each ring and one for hits whose target is not known, per CPU. A preempted program can be interleaved with
 * another one on the same CPU, hence atomic adds. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FP_SHARDS_MAX + 1);
	__type(key, __u32);
	__type(value, struct fp_counters);
} counters SEC(".maps");

static __always_inline struct fp_counters *fp_counters_of(__u32 shard)
{
	return bpf_map_lookup_elem(&counters, &shard);
}

/* Counts for the recording that a target belongs to; target: NULL = not known. */
static __always_inline void fp_count(const struct fp_target *target, __u32 counter)
{
	struct fp_counters *row = fp_counters_of(target ? target->shard : FP_SHARDS_MAX);

	if (row && counter < FP_CNT_MAX)
		__sync_fetch_and_add(&row->value[counter], 1);
}

/* The row of a slot if it is in use. */
static __always_inline struct fp_target *fp_target_of(__u32 slot)
{
	struct fp_target *target = bpf_map_lookup_elem(&targets, &slot);

	return target && target->tgid ? target : NULL;
}

/* Counts a record that found its ring full: in sum, and for its process, whose ledger is lossy from now on. */
static __always_inline void fp_lost(struct fp_target *target, __u32 counter)
{
	fp_count(target, counter);
	if (counter == FP_CNT_LOST_ALLOC)
		__sync_fetch_and_add(&target->lost_alloc, 1);
	else if (counter == FP_CNT_LOST_FREE)
		__sync_fetch_and_add(&target->lost_free, 1);
	else
		__sync_fetch_and_add(&target->lost_other, 1);
}

static __always_inline void fp_fill_head(struct fp_head *head, struct fp_target *target, __u32 slot, __u32 tid, __u8 kind,
					 __u8 function)
{
	head->kind = kind;
	head->function = function;
	head->slot = slot;
	head->tid = tid;
	head->stamp = (__u64)target->generation << FP_STAMP_TIME_BITS | (bpf_ktime_get_ns() & ((1ULL << FP_STAMP_TIME_BITS) - 1));
}

/* The ring of a target. The key is copied: verifiers up to 6.1 take none that is behind an argument of a function that is checked by itself. */
static __always_inline void *fp_ring_of(const struct fp_target *target)
{
	__u32 shard = target->shard;

	return bpf_map_lookup_elem(&rings, &shard);
}

/* Reserves a record in the target's ring and fills its head; counts the loss if the ring is full. Submit with fp_submit. */
#define FP_RESERVE(type, target, slot, tid, kind, function, lost)                                       \
	({                                                                                          \
		type *record_ = NULL;                                                               \
		void *ring_ = fp_ring_of(target);                                                   \
		if (ring_)                                                                          \
			record_ = bpf_ringbuf_reserve(ring_, sizeof(type), 0);                      \
		if (record_)                                                                        \
			fp_fill_head(&record_->head, target, slot, tid, kind, function);                 \
		else                                                                                \
			fp_lost(target, lost);                                                      \
		record_;                                                                            \
	})

/* The reader polls; a wake-up per record costs more than the record (7.6 us against 2 us). */
static __always_inline void fp_submit(void *record)
{
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
}

#endif
