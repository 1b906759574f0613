/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The user stack of the current thread, by unwind tables.
 *
 * One step finds the mapping of a pc, the row that covers it, and by the row's rule the caller's stack pointer, rbp and pc. bpf_loop
 * repeats it: one program, no tail calls, and the verifier looks at one step only. All state lives in the thread's own storage: uprobe
 * programs can be preempted, so per-CPU scratch could be trampled.
 *
 * Stack words are read through a window of 1 KiB, because one copy of 1 KiB costs hardly more than one of 8 bytes and the next frames'
 * words are mostly near.
 *
 * Most of a stack is what it was at the thread's last walk. So the last walk's frames are kept, each with what its step had read from
 * the stack. Where a walk comes to a frame that the last walk also came to (same pc, stack pointer and rbp) and the words that the step
 * read then still have the same values, the step must lead to the same caller, and the tables need not be asked. That is no guess: a step
 * is a function of the pc, the two registers, those words and the tables, and the tables' generation is compared once a walk. Steps that
 * read anything else (other registers, a saved stack pointer, a signal frame, a probe's trampoline) are marked and always done anew.
 *
 * Every walk ends with a reason (enum fp_unwind_end).
 */
#ifndef FRAGPROF_UNWIND_BPF_H
#define FRAGPROF_UNWIND_BPF_H

#ifndef FP_HOST
#include "unwind_maps.bpf.h"
#endif

/* First address that no user code has: 47 bits, of which the last page is never mapped. */
#define FP_USER_END ((1ULL << 47) - 4096)

/* Words of the window, and how many of them lie below the word asked for: registers are saved below the return address, which is read
 * first. */
#define FP_WINDOW_WORDS 128
#define FP_WINDOW_BELOW 8

/* The farthest a frame pointer may lie above the stack pointer to be believed where no table vouches for it. */
#define FP_FRAME_BYTES_MAX (1ULL << 20)

/* Value of an rbp that is not known: not aligned, so nothing is ever read through it. */
#define FP_BP_UNKNOWN 1ULL

/* Between two requests for a table of the same process. */
#define FP_ASK_INTERVAL_NS 100000000ULL

/* Pending return probes of a thread: the kernel's MAX_URETPROBE_DEPTH. */
#define FP_RETURNS_MAX 64

/* What the registers of a frame are besides pc, sp and bp. */
enum fp_registers {
	FP_REGS_NONE = 0,   /* not known: a caller's frame */
	FP_REGS_LEAF = 1,   /* in walk->leaf */
	FP_REGS_SIGNAL = 2, /* in the struct sigcontext at walk->sigcontext */
};

/* One step of a walk: the frame it started from, and what it read. */
struct fp_step {
	__u64 word;     /* the frame as it is shown: FP_FRAME_* | pc */
	__u64 sp;
	__u64 bp;
	__s32 bp_at;    /* where the caller's rbp was read, from the caller's sp; 0 = nowhere: it follows from the registers */
	__u32 how;      /* FP_STEP_* */
};

/* What a step depended on. */
#define FP_STEP_REPEATABLE (1u << 0) /* it read nothing but the caller's rbp and the return address, just below the caller's sp */
#define FP_STEP_USES_BP (1u << 1)    /* its own rbp decided where */

/* What of a frame word is known before its step. */
#define FP_FRAME_BEFORE (FP_FRAME_ADDR_MASK | FP_FRAME_EXACT | FP_FRAME_GUESSED)

/* Frames of the last walk that are passed over at a time to find the one at the same height. A walk whose inner part is shorter than
 * the last one's catches up over its next steps. */
#define FP_CATCH_UP 4

struct fp_walk {
	/* Result. */
	__u64 hash;
	__u64 need_pc;          /* not 0: ask the daemon for the table of this pc (rate limited here) */
	__u32 len;
	__u32 end;              /* enum fp_unwind_end */
	__u32 defined;          /* the caller's: what it has been sent to; 0 after each change of the walk */
	__u32 mm_id;
	struct fp_stack record; /* so that record and frames can be sent in one piece */
	__u64 frames[FP_FRAMES_MAX];

	/* The frame reached. */
	__u64 pc;
	__u64 sp;
	__u64 bp;
	__u64 sigcontext;
	__u32 registers;        /* enum fp_registers */
	__u32 flags;            /* FP_FRAME_* of the frame, shifted right by 32 */
	__u64 entry_sp;         /* where the first frame's return address is, if the caller knows; else 0 */

	/* The mapping and the table last used. */
	struct fp_mapping mapping;
	__u32 table_ready;
	__u32 first_granule;
	__u32 granules;
	__u32 rules_block;
	__u32 rows_block;
	__u32 pad;

	/* Stack memory at window_base; ~0 = nothing. */
	__u64 window_base;
	__u64 window[FP_WINDOW_WORDS];

	__u64 leaf[16];         /* registers at the probe, by DWARF number */

	/* The walk that goes on and the last one, in the two halves of `steps` in turn. */
	__u32 now;              /* where this walk's steps begin: 0 or FP_FRAMES_MAX */
	__u32 last_len;         /* steps of the last walk that can be compared with */
	__u32 last_at;          /* the one at the height reached */
	__u32 last_end;         /* why it ended */
	__u32 generation;       /* of the tables at the last walk */
	__u32 repeated;         /* steps of this walk that were repeated */
	__u32 now_repeatable;   /* for the step under way: FP_STEP_REPEATABLE */
	__u32 now_uses_bp;      /* FP_STEP_USES_BP */
	__s32 now_bp_at;
	__u32 pad2;
	struct fp_step steps[2 * FP_FRAMES_MAX];
};

/* Reads the word at addr of the stack. */
static __always_inline bool fp_read_word(struct fp_walk *walk, __u64 addr, __u64 *value)
{
	__u64 distance = addr - walk->window_base;

	if (distance > 8 * (FP_WINDOW_WORDS - 1) || (distance & 7)) {
		__u64 base = addr - 8 * FP_WINDOW_BELOW;

		if (bpf_probe_read_user(walk->window, sizeof(walk->window), (void *)base)) {
			/* The end of the stack, or a page that is not there. */
			walk->window_base = ~0ULL;
			return !bpf_probe_read_user(value, sizeof(*value), (void *)addr);
		}
		walk->window_base = base;
		distance = 8 * FP_WINDOW_BELOW;
	}
	*value = walk->window[(distance >> 3) & (FP_WINDOW_WORDS - 1)];
	return true;
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

/* Notes where the parts of the mapping's table are. */
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
		/* The last row from at to end that does not lie above pc; without branches, which nobody could predict. */
#pragma unroll
		for (step = FP_ROWS_PER_BLOCK / 2; step; step /= 2) {
			__u64 try = at + step;

			at += step & fp_below(try, end) & ~fp_below(pc, rows->pc[try & (FP_ROWS_PER_BLOCK - 1)]);
		}
		id = rows->rule[at & (FP_ROWS_PER_BLOCK - 1)];
	} else {
		/* pc lies before the granule's first row: the row before it goes on. */
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

/* struct sigcontext's offset of a register, by DWARF number (arch/x86/include/uapi/asm/sigcontext.h). */
static __always_inline __u32 fp_sigcontext_offset(__u32 reg)
{
	switch (reg) {
	case 0: return 104;  /* rax */
	case 1: return 96;   /* rdx */
	case 2: return 112;  /* rcx */
	case 3: return 88;   /* rbx */
	case 4: return 72;   /* rsi */
	case 5: return 64;   /* rdi */
	case 6: return 80;   /* rbp */
	case 7: return 120;  /* rsp */
	default: return 8 * (reg - 8); /* r8 to r15 */
	}
}

/* struct ucontext begins with flags, link and the alternate stack; then the sigcontext. */
#define FP_UCONTEXT_SIGCONTEXT 40
#define FP_SIGCONTEXT_RIP 128

static __always_inline bool fp_register_of(struct fp_walk *walk, __u32 reg, __u64 *value)
{
	if (reg == 7) {
		*value = walk->sp;
		return true;
	}
	if (reg == 6) {
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

/* The frame that a signal interrupted: its registers lie at sp. */
static __always_inline __u32 fp_step_signal(struct fp_walk *walk)
{
	__u64 sigcontext = walk->sp + FP_UCONTEXT_SIGCONTEXT, pc, sp, bp;

	walk->now_repeatable = 0;
	if (!fp_read_word(walk, sigcontext + fp_sigcontext_offset(6), &bp) ||
	    !fp_read_word(walk, sigcontext + fp_sigcontext_offset(7), &sp) ||
	    !fp_read_word(walk, sigcontext + FP_SIGCONTEXT_RIP, &pc))
		return FP_END_READ_FAULT;
	walk->pc = pc;
	walk->sp = sp;
	walk->bp = bp;
	walk->sigcontext = sigcontext;
	walk->registers = FP_REGS_SIGNAL;
	walk->flags = FP_FRAME_EXACT >> 32;
	return FP_END_NONE;
}

/* The first frame, whose function has no row: the probe knows where its return address is, and nothing was done to rbp before it. */
static __always_inline __u32 fp_step_entry(struct fp_walk *walk)
{
	__u64 pc;

	if (!fp_read_word(walk, walk->entry_sp, &pc))
		return FP_END_READ_FAULT;
	walk->pc = pc;
	walk->sp = walk->entry_sp + 8;
	walk->registers = FP_REGS_NONE;
	walk->flags = 0;
	walk->now_uses_bp = 0;
	return FP_END_NONE;
}

/* One step by frame pointer, believed only if the frame pointer points a little way up the stack and the word beside it into known
 * code. `failed` is the reason to end otherwise. */
static __always_inline __u32 fp_step_frame_pointer(struct fp_walk *walk, __u64 flags, __u32 failed)
{
	__u64 bp = walk->bp, caller_bp, caller_pc;

	/* The ABI asks the outermost frame to have rbp = 0 (psABI 3.4.1); musl's assembly without tables does it. */
	if (!bp)
		return FP_END_COMPLETE;
	if ((bp & 7) || bp < walk->sp || bp - walk->sp > FP_FRAME_BYTES_MAX)
		return failed;
	if (!fp_read_word(walk, bp + 8, &caller_pc) || !fp_read_word(walk, bp, &caller_bp))
		return failed;
	if (caller_pc >= FP_USER_END || !fp_find_mapping(walk, caller_pc))
		return failed;
	walk->now_bp_at = -16;
	walk->pc = caller_pc;
	walk->sp = bp + 16;
	walk->bp = caller_bp;
	walk->registers = FP_REGS_NONE;
	walk->flags = flags >> 32;
	return FP_END_NONE;
}

/* mov $15, %rax or %eax; syscall: how every libc returns from a signal handler. The kernel's ABI makes it the same everywhere, and
 * musl's has no table. */
static __always_inline bool fp_is_signal_return(__u64 pc)
{
	__u64 code[2] = {};

	if (bpf_probe_read_user(code, 9, (void *)pc))
		return false;
	return (code[0] == 0x0f0000000fc0c748ULL && (code[1] & 0xff) == 0x05) ||
	       (code[0] & 0x00ffffffffffffffULL) == 0x00050f0000000fb8ULL;
}

/* By the rule of the pc. */
static __always_inline __u32 fp_step_rule(struct fp_walk *walk, const struct fp_rule *rule, __u64 addr)
{
	__u32 reg = rule->registers & 15, reg2 = rule->registers >> 4;
	__u64 base, index, cfa, bp = walk->bp, pc, bp_address = 0;

	switch (rule->cfa) {
	case FP_CFA_REGISTER:
		if (!fp_register_of(walk, reg, &base))
			return FP_END_UNSUPPORTED;
		cfa = base + (__s64)rule->offset;
		if (reg == 7 && (rule->saved & 15) != FP_BP_AT_BP)
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

	if (rule->saved >> 4 == FP_RA_IN_REGISTER) {
		if (!fp_register_of(walk, reg2, &pc))
			return FP_END_UNSUPPORTED;
	} else if (!fp_read_word(walk, cfa - 8, &pc)) {
		return FP_END_READ_FAULT;
	}

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
	if (bp_address) {
		__s64 distance = bp_address - cfa;

		if (!fp_read_word(walk, bp_address, &bp))
			return FP_END_READ_FAULT;
		walk->now_bp_at = (__s32)distance;
		if (!distance || distance != (__s32)distance)
			walk->now_repeatable = 0;
	}
	walk->pc = pc;
	walk->sp = cfa;
	walk->bp = bp;
	walk->registers = FP_REGS_NONE;
	walk->flags = 0;
	return FP_END_NONE;
}

#ifndef FP_HOST
/* If pc is the return trampoline, the return address that it stands for. The kernel keeps one entry a pending return probe, the newest
 * first, with the stack address of the word it replaced; entries of frames that longjmp has left may lie between. */
static __noinline __u64 fp_resolve_trampoline(__u64 pc, __u64 slot)
{
	struct task_struct *task = bpf_get_current_task_btf();
	struct return_instance *instance;
	struct xol_area *area;
	int i;

	area = task->mm->uprobes_state.xol_area;
	if (!area || area->vaddr != pc)
		return 0;
	instance = task->utask->return_instances;
	for (i = 0; i < FP_RETURNS_MAX && instance; i++) {
		if (instance->stack == slot)
			return instance->orig_ret_vaddr;
		instance = instance->next;
	}
	return pc;
}
#endif

static __always_inline struct fp_step *fp_step_at(struct fp_walk *walk, __u32 half, __u32 at)
{
	return &walk->steps[(half + at) & (2 * FP_FRAMES_MAX - 1)];
}

/* Appends the frame reached. */
static __always_inline struct fp_step *fp_append(struct fp_walk *walk, __u64 word)
{
	__u32 at = walk->len & (FP_FRAMES_MAX - 1);
	struct fp_step *step = fp_step_at(walk, walk->now, at);
	__u64 hash = (walk->hash ^ word) * 0x9e3779b97f4a7c15ULL;

	walk->hash = hash ^ hash >> 32;
	walk->frames[at] = word;
	walk->len += 1;
	step->word = word;
	step->sp = walk->sp;
	step->bp = walk->bp;
	step->bp_at = 0;
	step->how = 0;
	return step;
}

enum fp_repeat {
	FP_REPEAT_NOT,
	FP_REPEAT_STEP, /* the frame was appended, its caller reached */
	FP_REPEAT_END,  /* the frame was appended, and is the outermost */
};

/* Repeats the last walk's step from the same frame, if the words that it read are the same. */
static __always_inline enum fp_repeat fp_repeat_step(struct fp_walk *walk)
{
	__u32 half = walk->now ^ FP_FRAMES_MAX, at = walk->last_at, i;
	__u64 before = walk->pc | (__u64)walk->flags << 32, value, caller_bp, caller_sp;
	struct fp_step *last = fp_step_at(walk, half, at), *caller, *step;
	__s64 bp_at;
	__u32 how;

	for (i = 0; i < FP_CATCH_UP; i++) {
		if (at >= walk->last_len || last->sp >= walk->sp)
			break;
		at++;
		last = fp_step_at(walk, half, at);
	}
	walk->last_at = at;
	if (at >= walk->last_len || walk->len >= FP_FRAMES_MAX)
		return FP_REPEAT_NOT;
	if (last->sp != walk->sp || last->bp != walk->bp || (last->word & FP_FRAME_BEFORE) != before || !(last->how & FP_STEP_REPEATABLE))
		return FP_REPEAT_NOT;
	if (at + 1 == walk->last_len) {
		if (walk->last_end != FP_END_COMPLETE)
			return FP_REPEAT_NOT;
		how = last->how;
		fp_append(walk, last->word)->how = how;
		walk->repeated += 1;
		return FP_REPEAT_END;
	}
	caller = fp_step_at(walk, half, at + 1);
	caller_sp = caller->sp;
	caller_bp = caller->bp;
	if (!fp_read_word(walk, caller_sp - 8, &value) || value != (caller->word & FP_FRAME_ADDR_MASK))
		return FP_REPEAT_NOT;
	bp_at = last->bp_at;
	if (bp_at && (!fp_read_word(walk, caller_sp + bp_at, &value) || value != caller_bp))
		return FP_REPEAT_NOT;
	how = last->how;
	step = fp_append(walk, last->word);
	step->bp_at = bp_at;
	step->how = how;
	walk->pc = caller->word & FP_FRAME_ADDR_MASK;
	walk->sp = caller_sp;
	walk->bp = caller_bp;
	walk->registers = FP_REGS_NONE;
	walk->flags = (caller->word & FP_FRAME_GUESSED) >> 32;
	walk->last_at = at + 1;
	walk->repeated += 1;
	return FP_REPEAT_STEP;
}

/* One frame: finds its mapping and rule, appends it, and steps to its caller. */
static __always_inline __u32 fp_step_anew(struct fp_walk *walk)
{
	__u64 pc = walk->pc, flags = (__u64)walk->flags << 32, addr;
	struct fp_rule rule = {};
	struct fp_step *step;
	bool known;
	__u32 end = FP_END_NO_ROW;

	if (!pc || pc >= FP_USER_END)
		return FP_END_BAD_PC;
	known = fp_find_mapping(walk, pc);
	if (!known && !flags) {
		/* The word that a return probe replaced lies just below the caller's stack pointer. */
		pc = fp_resolve_trampoline(pc, walk->sp - 8);
		if (pc == walk->pc)
			return FP_END_TRAMPOLINE;
		if (pc) {
			/* The step that came here read the trampoline's address. */
			fp_step_at(walk, walk->now, (walk->len - 1) & (FP_FRAMES_MAX - 1))->how = 0;
			walk->pc = pc;
			known = fp_find_mapping(walk, pc);
		} else {
			pc = walk->pc;
		}
	}
	if (walk->len >= FP_FRAMES_MAX)
		return FP_END_FRAME_LIMIT;
	addr = pc - walk->mapping.bias;
	if (known) {
		if (walk->mapping.kind == FP_MAPPING_JIT)
			flags |= FP_FRAME_JIT;
		/* A return address may be the first byte of the next function, or of another row: its call lies before it. */
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
	step->bp_at = walk->now_bp_at;
	/* The outermost frame is known by its pc and rbp alone. */
	step->how = end == FP_END_NONE ? walk->now_repeatable : end == FP_END_COMPLETE ? FP_STEP_REPEATABLE : 0;
	step->how |= walk->now_uses_bp;
	return end;
}

struct fp_walk_loop {
	struct fp_walk *walk;
};

static long fp_walk_loop(__u32 i, struct fp_walk_loop *loop)
{
	struct fp_walk *walk = loop->walk;

	switch (fp_repeat_step(walk)) {
	case FP_REPEAT_STEP:
		return 0;
	case FP_REPEAT_END:
		walk->end = FP_END_COMPLETE;
		return 1;
	default:
		walk->end = fp_step_anew(walk);
		return walk->end != FP_END_NONE;
	}
}

/* Asks for a table if the walk ended for want of one, but not again for a while. */
static __always_inline void fp_ask_for_table(struct fp_walk *walk)
{
	struct fp_mappings_header *header;
	__u32 key = walk->mm_id;
	void *table;
	__u64 now;

	if (walk->end != FP_END_NO_TABLE && walk->end != FP_END_NO_MAPPING)
		return;
	table = bpf_map_lookup_elem(&mapping_tables, &key);
	if (!table)
		return;
	key = 0;
	header = bpf_map_lookup_elem(table, &key);
	if (!header)
		return;
	now = bpf_ktime_get_ns();
	if (now - header->asked < FP_ASK_INTERVAL_NS)
		return;
	header->asked = now;
	walk->need_pc = walk->pc;
}

/* What fp_verify_loop goes through. */
struct fp_verify_loop {
	struct fp_walk *walk;
	__u32 last;     /* index of the outermost step */
	__u32 verified; /* steps whose words are the same */
	__u32 other_bp; /* rbp is not what it was, and has not been read back from the stack yet */
	__u32 pad;
};

/* Compares the words that a step of the last walk read with what the stack holds now. */
static long fp_verify_loop(__u32 i, struct fp_verify_loop *loop)
{
	struct fp_walk *walk = loop->walk;
	struct fp_step *step = fp_step_at(walk, walk->now, i), *caller = fp_step_at(walk, walk->now, i + 1);
	__u64 value;

	if (!(step->how & FP_STEP_REPEATABLE) || (loop->other_bp && step->how & FP_STEP_USES_BP))
		return 1;
	if (i >= loop->last) {
		loop->verified = i + 1;
		return 1;
	}
	if (!fp_read_word(walk, caller->sp - 8, &value) || value != (caller->word & FP_FRAME_ADDR_MASK))
		return 1;
	if (!step->bp_at)
		return 0;
	loop->other_bp = 0;
	return !fp_read_word(walk, caller->sp + step->bp_at, &value) || value != caller->bp;
}

/* Whether a walk from these registers would come out as the last one did, because it begins at the same pc, sp and rbp and every stack
 * word that the last one read still holds the same value. Each word decides the next step together with the tables, so this is proof.
 * Another rbp does not matter to steps that do not use it, up to the one that reads rbp back from the stack: to compilers it is a
 * register like any other. */
static __always_inline bool fp_is_same_walk(struct fp_walk *walk, struct pt_regs *regs)
{
	struct fp_step *leaf = fp_step_at(walk, walk->now, 0);
	struct fp_verify_loop loop = { .walk = walk, .other_bp = leaf->bp != regs->bp };

	if (walk->end != FP_END_COMPLETE || !walk->len || walk->len > FP_FRAMES_MAX)
		return false;
	if (leaf->sp != regs->sp || leaf->word != (regs->ip | FP_FRAME_EXACT))
		return false;
	walk->window_base = ~0ULL;
	loop.last = walk->len - 1;
	bpf_loop(FP_FRAMES_MAX, fp_verify_loop, &loop, 0);
	return loop.verified == walk->len;
}

/*
 * Walks the current thread's user stack from regs, whose pc is the probed instruction. mm_id names the address space in
 * mapping_tables. entry_sp is the stack pointer as it was at the function's entry, if the probe lies in its straight line and the line
 * has not changed rbp; 0 if that is not known. It is used where the function has no unwind row (musl's malloc).
 *
 * The result is in walk, the thread's own: frames, len, end, hash (over frames and end: equal stacks have equal hashes; never 0),
 * need_pc (if not 0, the daemon should be asked for a table), and defined, which is 0 unless the caller set it for this very stack.
 */
static __always_inline void unwind_into(struct fp_walk *walk, struct pt_regs *regs, __u32 mm_id, __u64 entry_sp)
{
	struct fp_unwind_clock *clock;
	struct fp_walk_loop loop;
	__u32 zero = 0, generation = 0;
	__u64 hash;

	clock = bpf_map_lookup_elem(&unwind_clock, &zero);
	if (clock)
		generation = clock->generation;
	if (generation == walk->generation && mm_id == walk->mm_id && fp_is_same_walk(walk, regs)) {
		walk->need_pc = 0;
		walk->repeated = walk->len;
		fp_count(FP_CNT_WALK_REUSED);
		return;
	}
	hash = walk->hash;
	/* What was walked last is what is compared with now. */
	walk->last_len = walk->len;
	walk->last_end = walk->end;
	walk->now ^= FP_FRAMES_MAX;
	if (generation != walk->generation || mm_id != walk->mm_id) {
		walk->generation = generation;
		walk->mm_id = mm_id;
		walk->last_len = 0;
		walk->mapping.begin = 0;
		walk->mapping.end = 0;
		walk->table_ready = 0;
	}
	walk->leaf[0] = regs->ax;
	walk->leaf[1] = regs->dx;
	walk->leaf[2] = regs->cx;
	walk->leaf[3] = regs->bx;
	walk->leaf[4] = regs->si;
	walk->leaf[5] = regs->di;
	walk->leaf[8] = regs->r8;
	walk->leaf[9] = regs->r9;
	walk->leaf[10] = regs->r10;
	walk->leaf[11] = regs->r11;
	walk->leaf[12] = regs->r12;
	walk->leaf[13] = regs->r13;
	walk->leaf[14] = regs->r14;
	walk->leaf[15] = regs->r15;
	walk->pc = regs->ip;
	walk->sp = regs->sp;
	walk->bp = regs->bp;
	walk->entry_sp = entry_sp;
	walk->registers = FP_REGS_LEAF;
	walk->flags = FP_FRAME_EXACT >> 32;
	walk->window_base = ~0ULL;
	walk->need_pc = 0;
	walk->len = 0;
	walk->last_at = 0;
	walk->repeated = 0;
	walk->hash = 0;
	walk->end = FP_END_NONE;

	loop.walk = walk;
	bpf_loop(FP_FRAMES_MAX + 1, fp_walk_loop, &loop, 0);
	walk->hash ^= walk->end * 0xff51afd7ed558ccdULL;
	if (!walk->hash)
		walk->hash = 1;
	if (walk->hash != hash)
		walk->defined = 0;
	fp_ask_for_table(walk);

	fp_count(FP_CNT_WALK);
	fp_count_add(FP_CNT_FRAMES, walk->len);
	if (walk->repeated)
		fp_count(FP_CNT_WALK_TAIL_REUSED);
	fp_count(FP_CNT_END_FIRST + walk->end);
}

#endif
