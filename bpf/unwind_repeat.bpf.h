/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Reuse of the thread's last walk.
 *
 * Most of a stack is unchanged since the thread's last walk. So the last walk's frames are kept, each with what its step read from the
 * stack. If a walk reaches a frame that the last walk also reached (same pc, stack pointer and bp) and the words that the step read then
 * still have the same values, the step must lead to the same caller, and the tables need not be consulted. This is not a guess: a step is
 * a function of the pc, the two registers, those words and the tables (on arm64 the first one's of x30 too, if it has the return address),
 * and the tables' generation is compared once per walk. To most code, also that of Java's compilers, bp is a register like any other: where
 * it determines nothing but itself it may differ. Steps that read anything else (other registers, a saved stack pointer, a signal frame, a probe's trampoline) are marked and always done again.
 * Code that a JVM compiled at an address of other code may have the same size of frame: the daemon raises the generation each second while a
 * JVM is watched, so that the old name lasts no longer. An interpreted frame's method and bytecode are compared as well.
 *
 * A walk that is the same from the leaf on is verified as a whole, one that differs in its inner frames step by step. Of a walk of more than
 * FP_FRAMES_MAX frames only the outermost are kept to compare with.
 */
#ifndef FRAGPROF_UNWIND_REPEAT_BPF_H
#define FRAGPROF_UNWIND_REPEAT_BPF_H

#include "hotspot.bpf.h"

/* What of a frame word's flags is known before its step. */
#define FP_FLAGS_BEFORE (FP_FRAME_EXACT | FP_FRAME_GUESSED)

/* Frames of the last walk that are skipped at a time to find the one at the same height. A walk whose inner part is shorter than
 * the last one's catches up over its next steps. */
#define FP_CATCH_UP 4

enum fp_repeat {
	FP_REPEAT_NOT,
	FP_REPEAT_STEP, /* the frame was appended, its caller reached */
	FP_REPEAT_END,  /* the frame was appended, and is the outermost */
};

/* Reads the return address of a step that can be repeated. Where calls leave it in a register, the first frame may have it there still. */
static __always_inline bool fp_read_return(struct fp_walk *walk, bool is_first, __u64 caller_sp, __s64 bp_at, __u64 *pc)
{
#if !FP_RETURN_POPS
	if (!bp_at) {
		*pc = walk->leaf[FP_REG_LINK];
		return is_first;
	}
#endif
	return fp_read_word(walk, fp_repeated_return_slot(caller_sp, bp_at), pc);
}

/* Repeats the last walk's step from the same frame, if the words that it read are the same. */
static __always_inline enum fp_repeat fp_repeat_step(struct fp_walk *walk)
{
	__u32 half = walk->now ^ 1, at = walk->last_at, i;
	__u64 word, pc, caller_word, caller_bp, caller_sp;
	struct fp_step *last = fp_step_at(walk, half, at), *caller, *step;
	__s64 bp_at;
	__u32 how;

	for (i = 0; i < FP_CATCH_UP; i++) {
		if (at >= walk->last_len || fp_sp_of(walk, half, last) >= walk->sp)
			break;
		at++;
		last = fp_step_at(walk, half, at);
	}
	walk->last_at = at;
	if (at >= walk->last_len || fp_is_full(walk))
		return FP_REPEAT_NOT;
	word = *fp_word_at(walk, half, at);
	how = last->how;
	bp_at = last->bp_at;
	if (fp_sp_of(walk, half, last) != walk->sp || !(how & FP_STEP_REPEATABLE))
		return FP_REPEAT_NOT;
	if (last->bp != walk->bp && (how & FP_STEP_USES_BP || !bp_at))
		return FP_REPEAT_NOT;
	if (!fp_is_word_of(walk, word, walk->pc) || (fp_flags_of(word) & FP_FLAGS_BEFORE) != ((__u64)walk->flags << 32 & FP_FLAGS_BEFORE))
		return FP_REPEAT_NOT;
	if (at + 1 == walk->last_len) {
		if (walk->last_end != FP_END_COMPLETE)
			return FP_REPEAT_NOT;
		step = fp_append(walk, word);
		fp_step_done(walk, step, 0, how);
		walk->repeated += 1;
		return FP_REPEAT_END;
	}
	caller = fp_step_at(walk, half, at + 1);
	caller_word = *fp_word_at(walk, half, at + 1);
	caller_sp = fp_sp_of(walk, half, caller);
	caller_bp = caller->bp;
	if (FP_FRAME_IS_INTERPRETED(word)) {
		pc = fp_repeat_interpreted(walk, half, at);
	} else {
		if (!fp_read_return(walk, walk->registers == FP_REGS_LEAF, caller_sp, bp_at, &pc))
			return FP_REPEAT_NOT;
		if (bp_at && !fp_read_word(walk, caller_sp + bp_at, &caller_bp))
			return FP_REPEAT_NOT;
	}
	pc = fp_code_address(pc);
	if (!fp_is_word_of(walk, caller_word, pc))
		return FP_REPEAT_NOT;
	step = fp_append(walk, word);
	walk->pc = pc;
	walk->sp = caller_sp;
	walk->bp = caller_bp;
	walk->registers = FP_REGS_NONE;
	walk->flags = (fp_flags_of(caller_word) & FP_FRAME_GUESSED) >> 32;
	walk->last_at = at + 1;
	walk->repeated += 1;
	fp_step_done(walk, step, bp_at, how);
	return FP_REPEAT_STEP;
}

#ifdef FP_LEGACY
/* Steps are repeated one by one instead. */
static __always_inline bool fp_is_same_walk(struct fp_walk *walk)
{
	return false;
}
#else
/* The state of fp_verify_loop. */
struct fp_verify_loop {
	struct fp_walk *walk;
	__u32 last;     /* index of the outermost step */
	__u32 verified; /* steps whose words are the same */
	__u32 other_bp; /* bp differs from the last walk's */
	__u32 pad;
};

/* Compares the words that a step of the last walk read with what the stack holds now. */
static long fp_verify_loop(__u32 i, struct fp_verify_loop *loop)
{
	struct fp_walk *walk = loop->walk;
	struct fp_step *step = fp_step_at(walk, walk->now, i), *caller = fp_step_at(walk, walk->now, i + 1);
	__u64 caller_sp = fp_sp_of(walk, walk->now, caller), word, caller_word, value;

	if (!(step->how & FP_STEP_REPEATABLE) || (loop->other_bp && step->how & FP_STEP_USES_BP))
		return 1;
	if (i >= loop->last) {
		loop->verified = i + 1;
		return 1;
	}
	word = *fp_word_at(walk, walk->now, i);
	caller_word = *fp_word_at(walk, walk->now, i + 1);
	if (FP_FRAME_IS_INTERPRETED(word)) {
		loop->other_bp = 0;
		return !fp_is_word_of(walk, caller_word, fp_code_address(fp_repeat_interpreted(walk, walk->now, i)));
	}
	if (!fp_read_return(walk, !i, caller_sp, step->bp_at, &value) ||
	    !fp_is_word_of(walk, caller_word, fp_code_address(value)))
		return 1;
	if (!step->bp_at)
		return 0;
	if (!fp_read_word(walk, caller_sp + step->bp_at, &value))
		return 1;
	loop->other_bp = value != caller->bp;
	return 0;
}

/* Whether a walk from the registers in it would have the same result as the last one, because it begins at the same pc, sp and bp and every
 * stack word that the last one read still holds the same value. Each word determines the next step together with the tables, so this is
 * proof. A different bp does not matter to steps that do not use it. */
static __always_inline bool fp_is_same_walk(struct fp_walk *walk)
{
	struct fp_step *leaf = fp_step_at(walk, walk->now, 0);
	struct fp_verify_loop loop = { .walk = walk, .other_bp = leaf->bp != walk->bp };

	if (walk->end != FP_END_COMPLETE || walk->before || !walk->len || walk->len > FP_FRAMES_MAX)
		return false;
	if (walk->first_sp[walk->now & 1] != walk->sp || *fp_word_at(walk, walk->now, 0) != (walk->pc | FP_FRAME_EXACT))
		return false;
	walk->window_base = ~0ULL;
	loop.last = walk->len - 1;
	bpf_loop(FP_FRAMES_MAX, fp_verify_loop, &loop, 0);
	return loop.verified == walk->len;
}
#endif

#endif
