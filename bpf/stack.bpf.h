/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* From a walk to the reader: a stack is defined once, before the first record that refers to its hash. */
#ifndef FRAGPROF_STACK_BPF_H
#define FRAGPROF_STACK_BPF_H

#ifndef FP_LEGACY
#include "cpython_send.bpf.h"
#endif
#include "maps.bpf.h"
#include "thread.bpf.h"
#include "unwind.bpf.h"

/* A definition has been sent. */
static __always_inline void fp_note_sent(struct fp_walk *walk, struct fp_target *target, __u64 to, __u64 key)
{
	__u8 one = 1;

	walk->defined = to;
	if (bpf_map_update_elem(&stacks_sent, &key, &one, BPF_ANY))
		fp_count(target, FP_CNT_STACK_TABLE_FULL);
}

/* Sends the walk's definition unless this target's has been sent. */
static __always_inline void fp_define_stack(struct fp_walk *walk, struct fp_target *target, __u32 slot)
{
	__u64 to = (__u64)target->generation << 32 | slot, key = walk->hash ^ (to * 0x9e3779b97f4a7c15ULL);
	struct fp_stack *record = &walk->frames[walk->now & 1].record;
	void *ring;
	__u64 size;

	if (walk->defined == to)
		return;
	if (bpf_map_lookup_elem(&stacks_sent, &key)) {
		walk->defined = to;
		return;
	}
	ring = fp_ring_of(target);
	if (!ring)
		return;
#ifndef FP_LEGACY
	if (walk->python && !fp_python_send(walk, target, slot, ring)) {
		fp_lost(target, FP_CNT_LOST_STACK);
		return;
	}
#endif
	fp_fill_head(&record->head, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_STACK, 0);
	record->hash = walk->hash;
	record->len = walk->len;
	record->end = walk->end;
#ifndef FP_LEGACY
	if (walk->before) {
		if (fp_send_deep(walk, record, ring))
			fp_lost(target, FP_CNT_LOST_STACK);
		else
			fp_note_sent(walk, target, to, key);
		return;
	}
#endif
	size = walk->len;
	if (size > FP_FRAMES_MAX)
		size = FP_FRAMES_MAX;
	barrier_var(size); /* or the compiler compares one register and uses another, which 5.10's verifier cannot follow */
	size &= 2 * FP_FRAMES_MAX - 1;
	size = sizeof(*record) + size * sizeof(__u64);
	if (bpf_ringbuf_output(ring, record, size, BPF_RB_NO_WAKEUP)) {
		fp_lost(target, FP_CNT_LOST_STACK);
		return;
	}
	fp_note_sent(walk, target, to, key);
}

/* Requests the table that a walk found missing. Not a loss if the ring is full: a later walk requests it again. */
static __always_inline void fp_need_table(struct fp_target *target, __u32 slot, __u64 pc)
{
	void *ring = fp_ring_of(target);
	struct fp_need_table *record;

	if (!ring)
		return;
	record = bpf_ringbuf_reserve(ring, sizeof(*record), 0);
	if (!record)
		return;
	fp_fill_head(&record->head, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_NEED_TABLE, 0);
	record->pc = pc;
	fp_submit(record);
}

/* Walks the thread's stack, for a target. */
static __always_inline void fp_walk_stack(struct fp_walk *walk, struct pt_regs *regs, struct fp_target *target, __u64 entry_sp)
{
	unwind_into(walk, regs, (__u32)target->mm_id, entry_sp);
	fp_count_walk(walk, target->shard);
#ifndef FP_LEGACY
	if (walk->python && fp_python_take(walk))
		fp_count(target, FP_CNT_PYTHON_UNREAD);
#endif
}

static __always_inline __u64 fp_publish(struct fp_walk *walk, struct fp_target *target, __u32 slot)
{
	if (walk->need_pc)
		fp_need_table(target, slot, walk->need_pc);
	fp_define_stack(walk, target, slot);
	return walk->hash;
}

/* Makes the thread's last walk known to the reader; returns its hash. Checked by itself, as fp_unwind. */
#ifdef FP_LEGACY
__noinline __u64 fp_legacy_publish(__u32 slot)
{
	struct fp_thread *thread = fp_thread_find();
	struct fp_target *target = fp_target_of(slot);

	return thread && target ? fp_publish(&thread->walk, target, slot) : 0;
}

static __always_inline __u64 fp_publish_stack(struct fp_walk *walk, struct fp_target *target, __u32 slot)
{
	return fp_legacy_publish(slot);
}
#else
__noinline __u64 fp_publish_stack(struct fp_walk *walk, struct fp_target *target, __u32 slot)
{
	return walk && target ? fp_publish(walk, target, slot) : 0;
}
#endif

#endif
