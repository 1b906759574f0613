/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The user stack of the current thread, by unwind tables.
 *
 * One step finds the mapping of a pc, the row that covers it, and by the row's rule the caller's stack pointer, frame pointer and pc.
 * bpf_loop repeats it: one program, no tail calls, and the verifier checks one step only.
 *
 *   unwind_walk      the state, and reading a word of the stack
 *   unwind_lookup    pc -> mapping -> row -> rule
 *   unwind_step      frame -> caller
 *   hotspot          frame of a JVM -> caller
 *   unwind_repeat    reuses what the thread's last walk has established
 *   deep             more than FP_FRAMES_MAX frames
 *
 * Stack words are read through a window of 1 KiB, because one copy of 1 KiB costs hardly more than one of 8 bytes and the next frames'
 * words are mostly near.
 *
 * Every walk ends with a reason (enum fp_unwind_end).
 */
#ifndef FRAGPROF_UNWIND_BPF_H
#define FRAGPROF_UNWIND_BPF_H

#ifndef FP_LEGACY
#include "deep.bpf.h"
#endif
#include "unwind_repeat.bpf.h"
#include "unwind_step.bpf.h"

/* Between two requests for a table of the same process; if all that speaks for code there is a guessed frame pointer, which may be any
 * word, the time is longer. */
#define FP_ASK_INTERVAL_NS 100000000ULL
#define FP_ASK_GUESS_INTERVAL_NS 1000000000ULL

/* One frame: finds its mapping and rule, appends it, and steps to its caller. FP_END_MAX: nothing was done, because it is in the code cache
 * of a JVM (the programs' stack would not do for a call from here). */
FP_CHECKED_BY_ITSELF __u32 fp_step_anew(struct fp_walk *walk)
{
	struct fp_rule rule = {};
	struct fp_step *step;
	__u64 pc, flags, addr;
	bool known;
	__u32 end = FP_END_NO_ROW, how;

	if (!walk)
		return FP_END_UNSUPPORTED;
	pc = walk->pc;
	flags = (__u64)walk->flags << 32;
	if (!pc || pc >= FP_USER_END)
		return FP_END_BAD_PC;
	known = fp_find_mapping(walk, pc);
	if (!known && !flags) {
		/* A return probe is known by the stack pointer at its function's entry. */
		pc = fp_resolve_trampoline(pc, walk->sp - FP_RETURN_POPS);
		if (pc == walk->pc)
			return FP_END_TRAMPOLINE;
		if (pc) {
			/* The previous step read the trampoline's address. */
			fp_step_at(walk, walk->now, (walk->len - 1) & (FP_FRAMES_MAX - 1))->how = 0;
			walk->pc = pc;
			known = fp_find_mapping(walk, pc);
		} else {
			pc = walk->pc;
		}
	}
	if (fp_is_full(walk))
		return FP_END_FRAME_LIMIT;
#ifndef FP_LEGACY
	if (known && walk->mapping.kind == FP_MAPPING_HOTSPOT)
		return FP_END_MAX;
#endif
	addr = pc - walk->mapping.bias;
	if (known) {
		if (walk->mapping.kind == FP_MAPPING_JIT)
			flags |= FP_FRAME_JIT;
		/* A return address may be the first byte of the next function, or of another row: its call is before it. */
		if (walk->mapping.kind == FP_MAPPING_FILE)
			end = fp_find_rule(walk, addr - !(flags & FP_FRAME_EXACT), &rule);
		/* Assembly without a table. */
		if (end == FP_END_NO_ROW && !(flags & (FP_FRAME_EXACT | FP_FRAME_JIT)) && fp_is_signal_return(pc)) {
			rule.cfa = FP_CFA_SIGNAL;
			end = FP_END_NONE;
		}
		if (rule.cfa == FP_CFA_SIGNAL)
			flags |= FP_FRAME_SIGNAL;
	}
	step = fp_append(walk, pc | flags);
	if (!known)
		return FP_END_NO_MAPPING;
	if (end == FP_END_NO_TABLE)
		return end;
	walk->now_repeatable = FP_STEP_REPEATABLE;
	walk->now_uses_bp = FP_STEP_USES_BP;
	walk->now_bp_at = 0;
	if (end == FP_END_NONE)
		end = fp_step_rule(walk, &rule, addr);
	else if (walk->registers == FP_REGS_LEAF && walk->entry_sp)
		end = fp_step_entry(walk);
	else if (flags & FP_FRAME_JIT)
		end = fp_step_frame_pointer(walk, 0, FP_END_JIT);
	else
		end = fp_step_frame_pointer(walk, FP_FRAME_GUESSED, end);
	/* Behind generated code on arm64 sp is not known, and a rule that starts from it cannot be used: use the frame pointer, as a guess. */
	if (!FP_FRAME_POINTER_TELLS_SP && end == FP_END_UNSUPPORTED && walk->registers == FP_REGS_NO_SP)
		end = fp_step_frame_pointer(walk, FP_FRAME_GUESSED, end);
	/* The outermost frame is known by its pc and bp alone. */
	how = end == FP_END_NONE ? walk->now_repeatable : end == FP_END_COMPLETE ? FP_STEP_REPEATABLE : 0;
	fp_step_done(walk, step, walk->now_bp_at, how | walk->now_uses_bp);
	return end;
}

struct fp_walk_loop {
	struct fp_walk *walk;
};

static long fp_walk_loop(__u32 i, struct fp_walk_loop *loop)
{
	struct fp_walk *walk = loop->walk;

#ifndef FP_LEGACY
	if (walk->len >= FP_FRAMES_MAX)
		fp_deepen(walk);
#endif
	switch (fp_repeat_step(walk)) {
	case FP_REPEAT_STEP:
		return 0;
	case FP_REPEAT_END:
		walk->end = FP_END_COMPLETE;
		return 1;
	default:
		walk->end = fp_step_anew(walk);
#ifndef FP_LEGACY
		if (walk->end == FP_END_MAX)
			walk->end = fp_step_hotspot(walk);
#endif
		return walk->end != FP_END_NONE;
	}
}

#ifdef FP_LEGACY
/* One step of the current thread's walk; not 0 = it has ended. Global, so that the verifier checks it once, by itself, and the loop
 * adds nothing; before 5.13 such a function cannot take a pointer, so it finds the walk itself (thread.bpf.h). */
int fp_legacy_step(__u32 i);

static __always_inline void fp_walk_frames(struct fp_walk *walk)
{
	__u32 i;

	for (i = 0; i < FP_FRAMES_MAX + 1; i++)
		if (fp_legacy_step(i))
			break;
}
#else
static __always_inline void fp_walk_frames(struct fp_walk *walk)
{
	struct fp_walk_loop loop = { .walk = walk };

	bpf_loop(FP_FRAMES_DEEP_MAX + 1, fp_walk_loop, &loop, 0);
}
#endif

/* Requests a table if the walk ended for lack of one, at most once in a while. */
static __always_inline void fp_ask_for_table(struct fp_walk *walk)
{
	bool missing = walk->end == FP_END_NO_TABLE || walk->end == FP_END_NO_MAPPING;
	struct fp_mappings_header *header;
	__u32 key = walk->mm_id;
	void *table;
	__u64 now;

	if (!missing && !walk->unmapped_pc)
		return;
	table = bpf_map_lookup_elem(&mapping_tables, &key);
	if (!table)
		return;
	key = 0;
	header = bpf_map_lookup_elem(table, &key);
	if (!header)
		return;
	now = bpf_ktime_get_ns();
	if (now - header->asked < (missing ? FP_ASK_INTERVAL_NS : FP_ASK_GUESS_INTERVAL_NS))
		return;
	header->asked = now;
	walk->need_pc = missing ? walk->pc : walk->unmapped_pc;
}

#ifdef FP_LEGACY
/* fp_unwind for the current thread's walk, checked by itself. */
__u32 fp_legacy_unwind(__u32 mm_id);

static __always_inline __u32 fp_unwind(struct fp_walk *walk, __u32 mm_id)
#else
/* Checked by itself: verifiers up to 6.1 would check all of a walk anew for each state in which a program comes to it. Returns the number of
 * frames. */
__noinline __u32 fp_unwind(struct fp_walk *walk, __u32 mm_id)
#endif
{
	struct fp_unwind_clock *clock;
	__u32 zero = 0, generation = 0;
	__u64 hash;

	if (!walk)
		return 0;
	clock = bpf_map_lookup_elem(&unwind_clock, &zero);
	if (clock)
		generation = clock->generation;
	if (generation == walk->generation && mm_id == walk->mm_id && fp_is_same_walk(walk)) {
		walk->need_pc = 0;
		walk->repeated = walk->len;
		walk->reused = 1;
		return walk->len;
	}
	hash = walk->hash;
	/* The last walk is the one to compare with. */
	walk->last_len = walk->len;
	walk->last_end = walk->end;
	walk->now ^= 1;
	if (generation != walk->generation || mm_id != walk->mm_id) {
		walk->generation = generation;
		walk->mm_id = mm_id;
		walk->last_len = 0;
		walk->mapping.begin = 0;
		walk->mapping.end = 0;
		walk->table_ready = 0;
		walk->interpreter_end = 0;
		walk->python = fp_python_block(mm_id);
	}
	walk->first_sp[walk->now & 1] = walk->sp;
	walk->registers = FP_REGS_LEAF;
	walk->flags = FP_FRAME_EXACT >> 32;
	walk->window_base = ~0ULL;
	walk->need_pc = 0;
	walk->unmapped_pc = 0;
	walk->len = 0;
	walk->before = 0;
	walk->last_at = 0;
	walk->repeated = 0;
	walk->reused = 0;
	walk->hash = 0;
	walk->end = FP_END_NONE;

	fp_walk_frames(walk);
	walk->hash ^= walk->end * 0xff51afd7ed558ccdULL;
	if (!walk->hash)
		walk->hash = 1;
	if (walk->hash != hash)
		walk->defined = 0;
	fp_ask_for_table(walk);
	return walk->len;
}

/*
 * Walks the current thread's user stack from regs, whose pc is the probed instruction. mm_id names the address space in
 * mapping_tables. entry_sp is the stack pointer as it was at the function's entry, if the probe lies in its straight line and the line
 * has not changed bp; 0 if that is not known. It is used where the function has no unwind row (musl's malloc).
 *
 * The result is in walk, the thread's own: frames, len, end, hash (over frames and end: equal stacks have equal hashes; never 0),
 * need_pc (if not 0, a table should be requested from the daemon), and defined, which is 0 unless the caller set it for this very stack.
 */
static __always_inline void unwind_into(struct fp_walk *walk, struct pt_regs *regs, __u32 mm_id, __u64 entry_sp)
{
	fp_keep_registers(walk->leaf, regs);
	walk->pc = FP_PC(regs);
	walk->sp = FP_SP(regs);
	walk->bp = FP_BP(regs);
	walk->entry_sp = entry_sp;
#ifdef FP_LEGACY
	fp_legacy_unwind(mm_id);
#else
	fp_unwind(walk, mm_id);
#endif
}

/* Counts the walk that was just taken. */
static __always_inline void fp_count_walk(const struct fp_walk *walk, __u32 shard)
{
	struct fp_counters *row = fp_counters_of(shard);
	__u32 end = *(volatile const __u32 *)&walk->end; /* read once, so that the value checked is the value used */

	if (!row)
		return;
	if (walk->reused) {
		__sync_fetch_and_add(&row->value[FP_CNT_WALK_REUSED], 1);
		return;
	}
	__sync_fetch_and_add(&row->value[FP_CNT_WALK], 1);
	__sync_fetch_and_add(&row->value[FP_CNT_FRAMES], walk->before + walk->len);
	if (walk->repeated)
		__sync_fetch_and_add(&row->value[FP_CNT_WALK_TAIL_REUSED], 1);
	if (end < FP_END_MAX)
		__sync_fetch_and_add(&row->ends[end], 1);
}

#endif
