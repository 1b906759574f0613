/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The ways from a frame to its caller: by the row's rule, by a signal's saved registers, by the frame pointer where there is no table,
 * from the entry of a function without a row, and through the trampoline of a return probe.
 */
#ifndef FRAGPROF_UNWIND_STEP_BPF_H
#define FRAGPROF_UNWIND_STEP_BPF_H

#include "unwind_lookup.bpf.h"

/* Value of a bp that is not known: not aligned, so nothing is ever read through it. */
#define FP_BP_UNKNOWN 1ULL

/* Pending return probes of a thread: the kernel's MAX_URETPROBE_DEPTH. */
#define FP_RETURNS_MAX 64

static __always_inline bool fp_register_of(struct fp_walk *walk, __u32 reg, __u64 *value)
{
	if (reg == FP_REG_SP) {
		*value = walk->sp;
		return FP_FRAME_POINTER_TELLS_SP || walk->registers != FP_REGS_NO_SP;
	}
	if (reg == FP_REG_BP) {
		*value = walk->bp;
		return true;
	}
	walk->now_repeatable = 0;
	if (walk->registers == FP_REGS_LEAF) {
		*value = walk->leaf[reg & 15];
		return true;
	}
	if (walk->registers == FP_REGS_SIGNAL)
		return fp_read_word(walk, walk->sigcontext + fp_sigcontext_offset(reg & 15), value);
	return false;
}

/* The frame that a signal interrupted: its registers are at sp. */
static __always_inline __u32 fp_step_signal(struct fp_walk *walk)
{
	__u64 sigcontext = walk->sp + FP_SIGNAL_SIGCONTEXT, pc, sp, bp;

	walk->now_repeatable = 0;
	if (!FP_FRAME_POINTER_TELLS_SP && walk->registers == FP_REGS_NO_SP)
		return FP_END_UNSUPPORTED;
	if (!fp_read_word(walk, sigcontext + fp_sigcontext_offset(FP_REG_BP), &bp) ||
	    !fp_read_word(walk, sigcontext + fp_sigcontext_offset(FP_REG_SP), &sp) ||
	    !fp_read_word(walk, sigcontext + FP_SIGCONTEXT_PC, &pc))
		return FP_END_READ_FAULT;
	walk->pc = pc;
	walk->sp = sp;
	walk->bp = bp;
	walk->sigcontext = sigcontext;
	walk->registers = FP_REGS_SIGNAL;
	walk->flags = FP_FRAME_EXACT >> 32;
	return FP_END_NONE;
}

/* The first frame, whose function has no row: the probe knows the stack pointer at its entry, and bp has not been changed since. */
static __always_inline __u32 fp_step_entry(struct fp_walk *walk)
{
	__u64 pc;

#if FP_RETURN_POPS
	if (!fp_read_word(walk, walk->entry_sp, &pc))
		return FP_END_READ_FAULT;
#else
	pc = fp_code_address(walk->leaf[FP_REG_LINK]);
#endif
	walk->pc = pc;
	walk->sp = walk->entry_sp + FP_RETURN_POPS;
	walk->registers = FP_REGS_NONE;
	walk->flags = 0;
	walk->now_uses_bp = 0;
	return FP_END_NONE;
}

/* One step by frame pointer, accepted only if the frame pointer points a little way up the stack and the word next to it into known
 * code. `failed` is the reason to end otherwise. */
static __always_inline __u32 fp_step_frame_pointer(struct fp_walk *walk, __u64 flags, __u32 failed)
{
	__u64 bp = walk->bp, caller_bp, caller_pc;

	/* The ABIs require 0 here in the outermost frame (psABI 3.4.1, AAPCS64 6.4.6); musl's assembly without tables does so. */
	if (!bp)
		return FP_END_COMPLETE;
	if ((bp & 7) || bp < walk->sp || bp - walk->sp > FP_FRAME_BYTES_MAX)
		return failed;
	if (!fp_read_word(walk, bp + 8, &caller_pc) || !fp_read_word(walk, bp, &caller_bp))
		return failed;
	caller_pc = fp_code_address(caller_pc);
	if (caller_pc >= FP_USER_END)
		return failed;
	if (!fp_find_mapping(walk, caller_pc)) {
		walk->unmapped_pc = caller_pc;
		return failed;
	}
	walk->now_bp_at = -16;
	walk->pc = caller_pc;
	walk->sp = bp + 16;
	walk->bp = caller_bp;
	walk->registers = FP_REGS_NONE;
	if (!FP_FRAME_POINTER_TELLS_SP) {
		walk->registers = FP_REGS_NO_SP;
		walk->now_repeatable = 0;
	}
	walk->flags = flags >> 32;
	return FP_END_NONE;
}

/* Whether the code at pc is how a signal handler returns. */
static __always_inline bool fp_is_signal_return(__u64 pc)
{
	__u64 code[2] = {};

	if (bpf_probe_read_user(code, FP_SIGNAL_RETURN_BYTES, (void *)pc))
		return false;
	return fp_is_signal_return_code(code);
}

/* A step by the rule of the pc. */
static __always_inline __u32 fp_step_rule(struct fp_walk *walk, const struct fp_rule *rule, __u64 addr)
{
	__u32 reg = rule->registers & 15, reg2 = rule->registers >> 4;
	__u64 base, index, cfa, bp = walk->bp, pc, bp_address = 0;

	switch (rule->cfa) {
	case FP_CFA_REGISTER:
		if (!fp_register_of(walk, reg, &base))
			return FP_END_UNSUPPORTED;
		cfa = base + (__s64)rule->offset;
		if (reg == FP_REG_SP && (rule->saved & 15) != FP_BP_AT_BP)
			walk->now_uses_bp = 0;
		break;
	case FP_CFA_DEREF:
	case FP_CFA_DEREF_INDEX:
		if (!fp_register_of(walk, reg, &base))
			return FP_END_UNSUPPORTED;
		if (rule->cfa == FP_CFA_DEREF_INDEX) {
			if (!fp_register_of(walk, reg2, &index))
				return FP_END_UNSUPPORTED;
			base += 8 * index;
		}
		if (!fp_read_word(walk, base + (__s64)rule->deref_offset, &cfa))
			return FP_END_READ_FAULT;
		cfa += (__s64)rule->deref_add;
		walk->now_repeatable = 0;
		break;
	case FP_CFA_PLT:
		cfa = walk->sp + 8 + ((addr & 15) >= (__u32)rule->offset ? 8 : 0);
		break;
	case FP_CFA_SIGNAL:
		return fp_step_signal(walk);
	case FP_CFA_END:
		walk->now_uses_bp = 0;
		return FP_END_COMPLETE;
	default:
		return FP_END_UNSUPPORTED;
	}
	/* A frame holds at least its return address, if that is not in a register. */
	if (cfa < walk->sp + (rule->saved >> 4 == FP_RA_IN_REGISTER ? 0 : 8))
		return FP_END_NO_PROGRESS;

	switch (rule->saved & 15) {
	case FP_BP_SAME:
		break;
	case FP_BP_AT_CFA:
		bp_address = cfa + 8 * (__s64)rule->bp_slot;
		break;
	case FP_BP_AT_BP:
		bp_address = walk->bp + 8 * (__s64)rule->bp_slot;
		break;
	case FP_BP_AT_SP:
		bp_address = walk->sp + 8 * (__s64)rule->bp_slot;
		break;
	default:
		bp = FP_BP_UNKNOWN;
	}
	if (rule->saved >> 4 == FP_RA_IN_REGISTER) {
		__u32 repeatable = fp_is_link(reg2) && walk->registers == FP_REGS_LEAF ? walk->now_repeatable : 0;

		if (!fp_register_of(walk, reg2, &pc))
			return FP_END_UNSUPPORTED;
		walk->now_repeatable = repeatable;
	} else if (!fp_read_word(walk, fp_return_slot(rule, cfa, bp_address), &pc)) {
		return FP_END_READ_FAULT;
	} else if (!fp_return_is_repeatable(rule)) {
		walk->now_repeatable = 0;
	}
	if (bp_address) {
		__s64 distance = bp_address - cfa;

		if (!fp_read_word(walk, bp_address, &bp))
			return FP_END_READ_FAULT;
		walk->now_bp_at = (__s32)distance;
		if (!distance || distance != (__s32)distance)
			walk->now_repeatable = 0;
	}
	walk->pc = fp_code_address(pc);
	walk->sp = cfa;
	walk->bp = bp;
	walk->registers = FP_REGS_NONE;
	walk->flags = 0;
	return FP_END_NONE;
}

#ifndef FP_HOST
/* If pc is the return trampoline, the return address that it replaces. The kernel keeps one entry per pending return probe, the newest
 * first, with the stack address of the word it replaced; entries of frames that longjmp has left may be in between. */
static __noinline __u64 fp_resolve_trampoline(__u64 pc, __u64 slot)
{
	struct task_struct *task = fp_current_task();
	struct return_instance *instance;
	struct xol_area *area;
	int i;

	area = FP_KERNEL(task, mm, uprobes_state.xol_area);
	if (!area || fp_code_address(FP_KERNEL(area, vaddr)) != pc)
		return 0;
	instance = FP_KERNEL(task, utask, return_instances);
	for (i = 0; i < FP_RETURNS_MAX && instance; i++) {
		if (FP_KERNEL(instance, stack) == slot)
			return FP_KERNEL(instance, orig_ret_vaddr);
		instance = FP_KERNEL(instance, next);
	}
	return pc;
}
#endif

#endif
