/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Only large blocks of glibc -> records.
 *
 * After the thread-cache check in glibc's malloc, calloc and free there are instructions that only large blocks reach, plus the few small
 * ones for which the cache has no space or no block. A probe there costs a cached small block nothing, and sees every large one
 * (src/selective/ finds these instructions). The block is then in a register, its chunk's size before it in memory: small ones are
 * filtered by size, so that the same blocks are seen allocated and freed. The requested size is not known there; the size of a record is
 * the usable size.
 *
 * The functions that resize or align blocks have no such instruction. They are probed at entry and return as everywhere (alloc.bpf.h), and
 * hits between an open call's entry and its return are ignored.
 *
 * These probes have their own slot, and their own account of a thread's open calls: the probes of all entry points may be attached to the
 * same functions at the same time.
 */
#ifndef FRAGPROF_LARGE_BPF_H
#define FRAGPROF_LARGE_BPF_H

#include "alloc.bpf.h"

/* The block at a site: the register has it, or its chunk. 0 = none. */
static __always_inline __u64 fp_large_block(struct pt_regs *regs, __u64 cookie)
{
	__u64 value = fp_register(regs, FP_COOKIE_PTR_REG(cookie));

	return value && FP_COOKIE_HOLDS_CHUNK(cookie) ? value + FP_CHUNK_HEADER : value;
}

/* Whether a hit at sp is inside an open call. Calls whose probes were detached before they returned are dropped first: their frames are
 * gone, and the word that was their return address may be another probe's trampoline by now. */
static __always_inline bool fp_large_is_inside(struct pt_regs *regs, struct fp_thread *thread, struct fp_target *target, __u64 sp)
{
	if (thread->large_calls.epoch != target->epoch) {
		thread->large_calls.epoch = target->epoch;
		thread->large_calls.depth = 0;
	}
	return fp_is_nested(regs, thread, target, sp, true);
}

/* At an instruction that freed blocks reach. */
static __always_inline void fp_large_free(struct pt_regs *regs, struct fp_target *target, __u64 cookie)
{
	__u64 block = fp_large_block(regs, cookie);
	struct fp_thread *thread;

	if (!block) {
		fp_count(target, FP_CNT_HIT_NULL);
		return;
	}
	if (!fp_large_bytes(block)) {
		fp_count(target, FP_CNT_HIT_SMALL);
		return;
	}
	thread = fp_thread_find();
	if (thread && fp_large_is_inside(regs, thread, target, FP_SP(regs)))
		return;
	fp_send_free(target, cookie, (__u32)bpf_get_current_pid_tgid(), FP_REC_FREE, block);
}

/* Reads the block and its bytes at an instruction that new blocks pass, or the call's arguments at the entry of a function that resizes or
 * aligns blocks. Returns why it is not of a large block (FP_CNT_HIT_*), 0 if it may be. */
static __always_inline __u32 fp_large_look(struct pt_regs *regs, __u64 cookie, struct fp_call *call)
{
	__u32 op = FP_COOKIE_OP(cookie);

	if (op == FP_OP_LARGE_ALLOC) {
		call->sp = FP_SP(regs);
		call->ptr = fp_large_block(regs, cookie);
		if (!call->ptr)
			return FP_CNT_HIT_NULL;
		call->size = fp_large_bytes(call->ptr);
		return call->size ? 0 : FP_CNT_HIT_SMALL;
	}
	call->sp = fp_entry_sp(regs, cookie);
	call->size = fp_size_of(regs, cookie);
	if (FP_COOKIE_PTR_REG(cookie) != FP_NO_REG)
		call->ptr = fp_register(regs, FP_COOKIE_PTR_REG(cookie));
	/* A small old block is not tracked: as if there were none. */
	if (op == FP_OP_REALLOC && call->ptr && !fp_large_bytes(call->ptr))
		call->ptr = 0;
	return call->size >= FP_LARGE_REQUEST_MIN || (op == FP_OP_REALLOC && call->ptr) ? 0 : FP_CNT_HIT_SMALL;
}

/* At any site of this set. Returns the call's sequence number if its return is wanted, else 0. */
static __always_inline __u64 fp_large_enter_on(struct pt_regs *regs, struct fp_target *target, __u64 cookie)
{
	bool is_block = FP_COOKIE_OP(cookie) == FP_OP_LARGE_ALLOC;
	struct fp_call call = {};
	struct fp_thread *thread;
	__u32 no;

	if (FP_COOKIE_OP(cookie) == FP_OP_LARGE_FREE) {
		fp_large_free(regs, target, cookie);
		return 0;
	}
	no = fp_large_look(regs, cookie, &call);
	if (no) {
		fp_count(target, no);
		return 0;
	}
	thread = fp_thread_of_current(target);
	if (!thread) {
		fp_lost(target, FP_CNT_LOST_ALLOC);
		return 0;
	}
	if (fp_large_is_inside(regs, thread, target, call.sp))
		return 0;
	/* In the middle of a function only its unwind row describes the frame. */
	if (target->flags & FP_TARGET_STACKS)
		call.stack = fp_take_stack(regs, target, thread, cookie, is_block ? 0 : call.sp);
	if (is_block) {
		fp_send_alloc(target, cookie, thread->tid, call.ptr, call.size, call.stack);
		return 0;
	}
	return fp_open_new_call(target, thread, &call, cookie, true);
}

static __always_inline __u64 fp_large_enter(struct pt_regs *regs, __u64 cookie)
{
	struct fp_target *target = fp_target_on(cookie);
	struct fp_span span;
	__u64 sequence;

	if (!target)
		return 0;
	fp_span_begin(target, &span);
	sequence = fp_large_enter_on(regs, target, cookie);
	fp_span_end(target, &span);
	return sequence;
}

#endif
