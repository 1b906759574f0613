/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The state of a walk up a user stack, and its two smallest operations: reading a word of the stack and appending a frame.
 *
 * It is in the thread's own storage: uprobe programs can be preempted, so per-CPU scratch could be overwritten.
 */
#ifndef FRAGPROF_UNWIND_WALK_BPF_H
#define FRAGPROF_UNWIND_WALK_BPF_H

#ifndef FP_HOST
#include "unwind_maps.bpf.h"
#endif
#include "machine.bpf.h"

/* Global, so that the verifier checks it once, by itself. Within bpf_loop's callback Linux 7.2 does not finish checking it: to that
 * verifier all states that differ in the position of a search are different. Legacy programs have a function of their own around the whole
 * step. */
#ifdef FP_LEGACY
#define FP_CHECKED_BY_ITSELF static __always_inline
#else
#define FP_CHECKED_BY_ITSELF __noinline
#endif

/* The most frames of a stack, the innermost ones: at most FP_FRAMES_DEEP_MAX, set before the programs are loaded. Programs for old kernels
 * end at FP_FRAMES_MAX. */
#ifdef FP_HOST
static __u32 fp_frames_limit = FP_FRAMES_MAX;
#else
const volatile __u32 fp_frames_limit SEC(".rodata.frames") = FP_FRAMES_MAX;
#endif

/* The farthest a frame pointer may be above the stack pointer to be accepted where there is no table. */
#define FP_FRAME_BYTES_MAX (1ULL << 20)

/* Words of the window, and how many of them lie below the word requested: registers are saved below the return address, which is read
 * first. */
#define FP_WINDOW_WORDS 128
#define FP_WINDOW_BELOW 8

/* Where the registers of a frame other than pc, sp and bp are. */
enum fp_registers {
	FP_REGS_NONE = 0,   /* not known: a caller's frame */
	FP_REGS_LEAF = 1,   /* in walk->leaf */
	FP_REGS_SIGNAL = 2, /* in the struct sigcontext at walk->sigcontext */
	FP_REGS_NO_SP = 3,  /* not known; sp is only known not to be below walk->sp */
};

/* One step of a walk: the frame it started from, whose word is among the walk's frames, and what it read. */
struct fp_step {
	__u64 bp;
	__u32 sp;        /* words above the stack pointer of the walk's first frame; FP_SP_FAR = cannot be expressed so */
	__s32 bp_at : 30; /* where the caller's bp was read, from the caller's sp; 0 = nowhere: it follows from the registers */
	__u32 how : 2;   /* FP_STEP_* */
};

#define FP_SP_FAR 0xffffffffU

/* What a step depended on. */
#define FP_STEP_REPEATABLE (1u << 0) /* it read only the caller's bp, and the return address where fp_read_return does */
#define FP_STEP_USES_BP (1u << 1)    /* its own bp determined where */

/* The frames of a walk after the record's header, so that both can be sent in one piece. */
struct fp_frames {
	struct fp_stack record;
	__u64 words[FP_FRAMES_MAX]; /* as sent (enum fp_frame_bits) */
};

struct fp_walk {
	/* Result. The frames are in the half `now` of those below. */
	__u64 hash;
	__u64 need_pc;          /* not 0: request the table of this pc from the daemon (rate limited here) */
	__u64 unmapped_pc;      /* not 0: the walk ended where a frame pointer led, in no known mapping: in code generated since, or nowhere */
	__u64 defined;          /* for the caller: where it has been sent; 0 after each change of the walk */
	__u32 len;
	__u32 end;              /* enum fp_unwind_end */
	__u32 mm_id;
	__u32 python;           /* block of struct fp_python in the process's mapping table; 0 = no CPython */

	/* The frame reached. */
	__u64 pc;
	__u64 sp;
	__u64 bp;
	__u64 sigcontext;
	__u32 registers;        /* enum fp_registers */
	__u32 flags;            /* FP_FRAME_* of the frame, shifted right by 32 */
	__u64 entry_sp;         /* the stack pointer at the first frame's entry, if the caller knows; else 0 */

	/* The mapping and the table last used. */
	struct fp_mapping mapping;
	__u32 table_ready;
	__u32 first_granule;
	__u32 granules;
	__u32 rules_block;
	__u32 rows_block;
	__u32 before;           /* frames of this walk inside of those kept here: they are in struct fp_deep */

	/* Stack memory at window_base; ~0 = nothing. */
	__u64 window_base;
	__u64 window[FP_WINDOW_WORDS];

	union {
		__u64 leaf[16];                      /* registers at the probe, by their codes in rules; used in the first frame only */
		__u8 head[FP_HOTSPOT_METHOD_BYTES];  /* header of a blob (hotspot.bpf.h) */
	};

	/* Of the JVM whose code the walk has reached, to compare words of its frames (fp_is_word_of). interpreter_end = 0: not known. */
	__u64 code_begin;
	__u64 interpreter_begin;
	__u64 interpreter_end;
	__u32 bytecode_below;
	__u32 pad;

	/* The current walk and the last one, alternating between the two halves of the fields below. */
	__u32 now;              /* this walk's half: 0 or 1 */
	__u32 last_len;         /* steps of the last walk that can be compared with */
	__u32 last_at;          /* the step at the height reached */
	__u32 last_end;         /* why it ended */
	__u32 generation;       /* of the tables at the last walk */
	__u32 repeated;         /* steps of this walk that were repeated */
	__u32 now_repeatable;   /* for the current step: FP_STEP_REPEATABLE */
	__u32 now_uses_bp;      /* FP_STEP_USES_BP */
	__s32 now_bp_at;
	__u32 reused;           /* 1 = the last walk was proven unchanged, and is this one */
	__u64 first_sp[2];      /* stack pointer of the first frame */
	struct fp_frames frames[2];
	struct fp_step steps[2 * FP_FRAMES_MAX];
};

/* Whether a frame word of this walk or the last one is of a frame at this pc. For an interpreted frame this means only that it is one: its
 * method and bytecode are on the stack. */
static __always_inline bool fp_is_word_of(const struct fp_walk *walk, __u64 word, __u64 pc)
{
	switch (FP_FRAME_KIND(word)) {
	case FP_FRAME_KIND_JAVA_COMPILED:
		return walk->code_begin + (word & ((1ULL << FP_FRAME_CODE_BITS) - 1)) == pc;
	case FP_FRAME_KIND_JAVA_INTERPRETED:
	case FP_FRAME_KIND_JAVA_INTERPRETED_HIGH:
		return pc - walk->interpreter_begin < walk->interpreter_end - walk->interpreter_begin;
	default:
		return (word & FP_FRAME_ADDR_MASK) == pc;
	}
}

/* The flags in a frame word. */
static __always_inline __u64 fp_flags_of(__u64 word)
{
	return FP_FRAME_IS_INTERPRETED(word) ? 0 : word & (0xfULL << FP_FRAME_ADDR_BITS);
}

/* Reads the word at addr of the stack. */
static __always_inline bool fp_read_word(struct fp_walk *walk, __u64 addr, __u64 *value)
{
	__u64 distance = addr - walk->window_base;

	if (distance > 8 * (FP_WINDOW_WORDS - 1) || (distance & 7)) {
		__u64 base = addr - 8 * FP_WINDOW_BELOW;

		if (bpf_probe_read_user(walk->window, sizeof(walk->window), (void *)base)) {
			/* The end of the stack, or a page that is not present. */
			walk->window_base = ~0ULL;
			return !bpf_probe_read_user(value, sizeof(*value), (void *)addr);
		}
		walk->window_base = base;
		distance = 8 * FP_WINDOW_BELOW;
	}
	*value = walk->window[(distance >> 3) & (FP_WINDOW_WORDS - 1)];
	return true;
}

static __always_inline struct fp_step *fp_step_at(struct fp_walk *walk, __u32 half, __u32 at)
{
	__u32 index = half * FP_FRAMES_MAX + at;

	barrier_var(index); /* or the compiler builds it with a 32-bit "or", of which verifiers up to 6.1 know no bounds */
	return &walk->steps[index & (2 * FP_FRAMES_MAX - 1)];
}

static __always_inline __u64 *fp_word_at(struct fp_walk *walk, __u32 half, __u32 at)
{
	return &walk->frames[half & 1].words[at & (FP_FRAMES_MAX - 1)];
}

/* A stack pointer in the form in which a step of this walk keeps it. */
static __always_inline __u32 fp_near_sp(const struct fp_walk *walk, __u64 sp)
{
	__u64 distance = sp - walk->first_sp[walk->now & 1];

	return (distance & 7) || distance >= 8ULL * FP_SP_FAR ? FP_SP_FAR : distance >> 3;
}

/* The stack pointer of a step that fp_near_sp could express; else one above them all. */
static __always_inline __u64 fp_sp_of(const struct fp_walk *walk, __u32 half, const struct fp_step *step)
{
	return walk->first_sp[half & 1] + 8ULL * step->sp;
}

/* Whether the walk has as many frames as it may. */
static __always_inline bool fp_is_full(const struct fp_walk *walk)
{
	return walk->len >= FP_FRAMES_MAX || walk->before + walk->len >= fp_frames_limit;
}

/* Appends the frame reached. */
static __always_inline struct fp_step *fp_append(struct fp_walk *walk, __u64 word)
{
	__u64 hash = (walk->hash ^ word) * 0x9e3779b97f4a7c15ULL;
	struct fp_step *step;
	__u32 at = walk->len;

	barrier_var(at); /* or the compiler, which knows the bound from a test before, drops the mask; verifiers up to 6.1 have forgotten it */
	at &= FP_FRAMES_MAX - 1;
	step = fp_step_at(walk, walk->now, at);
	walk->hash = hash ^ hash >> 32;
	*fp_word_at(walk, walk->now, at) = word;
	walk->len += 1;
	step->sp = fp_near_sp(walk, walk->sp);
	step->bp = walk->bp;
	step->bp_at = 0;
	step->how = 0;
	return step;
}

/* Stores what the step that has just reached walk->sp depended on. It can only be repeated if all of that could be kept. */
static __always_inline void fp_step_done(struct fp_walk *walk, struct fp_step *step, __s32 bp_at, __u32 how)
{
	step->bp_at = bp_at;
	if (step->sp == FP_SP_FAR || fp_near_sp(walk, walk->sp) == FP_SP_FAR || step->bp_at != bp_at)
		how &= ~FP_STEP_REPEATABLE;
	step->how = how;
}

#endif
