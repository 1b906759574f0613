/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * exec, fork and exit of watched processes -> records, through the process's own ring, so that they are in order with its allocations.
 */
#ifndef FRAGPROF_LIFECYCLE_BPF_H
#define FRAGPROF_LIFECYCLE_BPF_H

#include "maps.bpf.h"
#include "thread.bpf.h"
#include "vm.bpf.h"

static __always_inline void fp_send_life_to(struct fp_target *target, __u32 slot, __u8 kind, __u32 other, __u8 detail)
{
	struct fp_life *record;

	record = FP_RESERVE(struct fp_life, target, slot, (__u32)bpf_get_current_pid_tgid(), kind, detail, FP_CNT_LOST_LIFE);
	if (!record)
		return;
	record->pid = bpf_get_current_pid_tgid() >> 32;
	record->other = other;
	if (bpf_get_current_comm(record->comm, sizeof(record->comm)))
		record->comm[0] = 0;
	fp_submit(record);
}

static __always_inline void fp_send_life(__u8 kind, __u32 other, __u8 detail)
{
	struct fp_slots *slots = fp_slots_of_current();
	struct fp_target *target;
	int i;

	if (!slots)
		return;
	for (i = 0; i < FP_SLOTS_LOOKED_AT; i++) {
		target = fp_target_of(slots->slot[i]);
		if (target)
			fp_send_life_to(target, slots->slot[i], kind, other, detail);
	}
}

/* The new image has new stacks, a new return trampoline and no open call. */
static __always_inline int fp_exec_done(struct task_struct *task, __u32 old_tid)
{
	struct fp_thread *thread = fp_thread_find();

	/* The thread that calls exec takes over the process's first thread id, and its state remains under the old one. */
	if (old_tid != (__u32)task->pid)
		fp_thread_forget(old_tid);
	if (thread) {
		thread->calls.depth = 0;
		thread->large_calls.depth = 0;
		thread->trampoline = 0;
	}
	fp_send_life(FP_REC_EXEC, 0, 0);
	return 0;
}

static __always_inline int fp_fork_done(struct task_struct *parent, struct task_struct *child)
{
	/* sched_process_fork fires for threads too. */
	if (child->pid == child->tgid)
		fp_send_life(FP_REC_FORK, child->pid, child->mm == parent->mm);
	return 0;
}

static __always_inline int fp_exit_done(struct task_struct *task)
{
	/* The last thread of the group: do_exit has already counted it out. */
	if (BPF_CORE_READ(task, signal, live.counter) == 0)
		fp_send_life(FP_REC_EXIT, task->exit_code, 0);
	else
		fp_send_life(FP_REC_THREAD_EXIT, 0, 0);
	fp_thread_forget(task->pid);
	return 0;
}

#endif
