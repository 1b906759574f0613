/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * One step up a frame of a HotSpot JVM.
 *
 * All code that HotSpot generates is in blobs of its code cache, and stacks are taken at call sites (an allocation is a call), where the
 * frame of a blob has its full size. So no table of rows is needed: the heap's segment map leads from a pc to its blob, and the blob's header
 * has the size of the frame. These are the JVM's own structures, which change while it compiles; they are read again at each step.
 *
 *   compiled method, native wrapper, runtime stub      interpreter            call stub, blobs without a size
 *
 *   CFA   = sp + frame_size                            CFA   = [bp - 8]       CFA   = bp + 16
 *   pc    = [CFA - 8]                                  pc    = [bp + 8]       pc    = [bp + 8]
 *   bp    = [CFA - 16]                                 bp    = [bp]           bp    = [bp]
 *
 *   stack of an interpreted frame:
 *
 *   [bp + 8]   return address
 *   [bp]       caller's bp
 *   [bp - 8]   the caller's sp before it made room for locals; arm64: may be below bp (FP_INTERPRETED_OVERLAPS)
 *   [bp - 24]  Method
 *   [bp - 64]  address of the bytecode; arm64: [bp - 72]; JDK 8: [bp - 56]
 *
 * The other slots of interpreted frames are the same in JDK 8 to 25 and on both machines (frame_x86.hpp and frame_aarch64.hpp,
 * interpreter_frame_*_offset), and so is what lies below the caller's stack pointer; all else is in struct fp_hotspot.
 *
 * What was found for a return address is kept for all threads, and holds as long as the tables' generation (a second at most) and the
 * compilation's number are the same: HotSpot gives each code that it compiles another one. So frames of methods are mostly known; what is left
 * is to read that number and the caller.
 *
 * Whatever a process writes there, a step reads a bounded number of words of its memory, and goes up its stack or ends.
 */
#ifndef FRAGPROF_HOTSPOT_BPF_H
#define FRAGPROF_HOTSPOT_BPF_H

#include "unwind_lookup.bpf.h"

/* Maximum number of tags followed to the start of a block, whose tag is 0. One leads there in 94 to 99 % of cases; blocks of more than 254
 * segments, and those that were joined or split, take more. This many are enough for blocks of 500 KiB. */
#define FP_HOTSPOT_HOPS 16

/* Tag of a free segment. */
#define FP_HOTSPOT_FREE 0xff

/* From bp to the words of an interpreted frame. */
#define FP_INTERPRETED_SENDER 8
#define FP_INTERPRETED_METHOD 24

/* The record of the JVM whose code the walk has reached. */
static __always_inline const struct fp_hotspot *fp_hotspot_of(struct fp_walk *walk)
{
	__u32 key = walk->mm_id;
	void *table = bpf_map_lookup_elem(&mapping_tables, &key);

	if (!table)
		return NULL;
	key = walk->mapping.file;
	return bpf_map_lookup_elem(table, &key);
}

/* A number of a blob that was read into walk->head. */
static __always_inline __u64 fp_head_word(struct fp_walk *walk, __u32 at)
{
	return *(__u64 *)(walk->head + (at & 0xff));
}

static __always_inline __u32 fp_head_number(struct fp_walk *walk, __u32 at)
{
	return *(__u32 *)(walk->head + (at & 0xff));
}

/* An address that a blob has as such, or as an offset from itself. */
static __always_inline __u64 fp_head_address(struct fp_walk *walk, const struct fp_hotspot *jvm, __u64 blob, __u32 at)
{
	return jvm->relative ? blob + fp_head_number(walk, at) : fp_head_word(walk, at);
}

/* Finds the blob of the pc and reads its header into walk->head. Returns its address; 0 = there is none. */
static __always_inline __u64 fp_find_blob(struct fp_walk *walk, const struct fp_hotspot *jvm)
{
	__u64 segment, blob;
	__u8 tag = FP_HOTSPOT_FREE;
	int i;

	segment = (walk->pc - walk->mapping.begin) >> (jvm->segment_shift & 31);
	for (i = 0; i < FP_HOTSPOT_HOPS; i++) {
		if (bpf_probe_read_user(&tag, sizeof(tag), (void *)(walk->mapping.bias + segment)) || tag == FP_HOTSPOT_FREE)
			return 0;
		if (!tag)
			break;
		segment -= tag;
	}
	blob = walk->mapping.begin + (segment << (jvm->segment_shift & 31)) + jvm->block_bytes;
	if (tag || blob >= walk->pc || bpf_probe_read_user(walk->head, FP_HOTSPOT_HEAD_BYTES, (void *)blob))
		return 0;
	if (walk->pc < fp_head_address(walk, jvm, blob, jvm->at_code_begin) || walk->pc >= fp_head_address(walk, jvm, blob, jvm->at_code_end))
		return 0;
	return blob;
}

/* Return addresses that are kept, one for each value of a hash. 40 B each: 160 KiB. */
#define FP_CODE_PLACES 4096

/* What is known of a return address. Threads write at the same time: a mixture of two has a wrong check. */
struct fp_code_place {
	__u64 pc;
	__u64 word;        /* without flags */
	__u64 id_at;       /* where the compilation's number is */
	__u32 mm_id;
	__u32 frame_bytes;
	__u32 check;       /* of the fields above and the tables' generation */
	__u32 pad;
};

#ifdef FP_HOST
static __thread struct fp_code_place code_places_of_host[FP_CODE_PLACES];
#else
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FP_CODE_PLACES);
	__type(key, __u32);
	__type(value, struct fp_code_place);
} code_places SEC(".maps");
#endif

static __always_inline struct fp_code_place *fp_code_place_of(const struct fp_walk *walk)
{
	__u32 key = ((walk->pc ^ walk->mm_id) * 0x9e3779b97f4a7c15ULL) >> 52;

#ifdef FP_HOST
	return &code_places_of_host[key];
#else
	return bpf_map_lookup_elem(&code_places, &key);
#endif
}

static __always_inline __u32 fp_code_check(const struct fp_walk *walk, __u64 word, __u64 id_at, __u32 frame_bytes)
{
	__u64 sum = (walk->pc ^ word << 1) * 0x9e3779b97f4a7c15ULL;

	sum = (sum ^ sum >> 32 ^ id_at) * 0xff51afd7ed558ccdULL;
	sum = (sum ^ sum >> 32 ^ (__u64)walk->generation << 32 ^ frame_bytes) * 0xc4ceb9fe1a85ec53ULL;
	return sum >> 32;
}

/* Copies what is known of the frame of the pc. false: nothing that holds. */
static __always_inline bool fp_find_code(const struct fp_walk *walk, __u64 *word, __u32 *frame_bytes)
{
	const volatile struct fp_code_place *place = fp_code_place_of(walk);
	__u32 id = 0, check;
	__u64 id_at;

	if (!place || place->pc != walk->pc || place->mm_id != walk->mm_id || (walk->flags & FP_FRAME_EXACT >> 32))
		return false;
	*word = place->word;
	*frame_bytes = place->frame_bytes;
	id_at = place->id_at;
	check = place->check;
	return check == fp_code_check(walk, *word, id_at, *frame_bytes) && !bpf_probe_read_user(&id, sizeof(id), (void *)id_at) &&
	       (id & ((1U << FP_FRAME_COMPILE_BITS) - 1)) == (*word >> FP_FRAME_CODE_BITS & ((1U << FP_FRAME_COMPILE_BITS) - 1));
}

static __always_inline void fp_keep_code(const struct fp_walk *walk, __u64 word, __u64 id_at, __u32 frame_bytes)
{
	struct fp_code_place *place = fp_code_place_of(walk);

	if (!place)
		return;
	place->pc = walk->pc;
	place->word = word;
	place->id_at = id_at;
	place->mm_id = walk->mm_id;
	place->frame_bytes = frame_bytes;
	place->check = fp_code_check(walk, word, id_at, frame_bytes);
}

static __always_inline __u64 fp_interpreted_word(__u64 method, __u64 bytecode)
{
	return (__u64)FP_FRAME_KIND_JAVA_INTERPRETED << FP_FRAME_KIND_BIT |
	       (method >> 3 & ((1ULL << FP_FRAME_METHOD_BITS) - 1)) << FP_FRAME_BYTECODE_BITS |
	       (bytecode & ((1ULL << FP_FRAME_BYTECODE_BITS) - 1));
}

/* The words of an interpreted frame on the stack. */
struct fp_interpreted {
	__u64 word;
	__u64 sender;
	__u64 pc;
	__u64 bp;
};

static __always_inline bool fp_read_interpreted(struct fp_walk *walk, __u64 bp, struct fp_interpreted *frame)
{
	__u64 method, bytecode;

	/* The lowest word first: the window then covers the others. */
	if ((bp & 7) || !fp_read_word(walk, bp - walk->bytecode_below, &bytecode) ||
	    !fp_read_word(walk, bp - FP_INTERPRETED_METHOD, &method) || !fp_read_word(walk, bp - FP_INTERPRETED_SENDER, &frame->sender) ||
	    !fp_read_word(walk, bp, &frame->bp) || !fp_read_word(walk, bp + 8, &frame->pc))
		return false;
	/* Such a caller is interpreted, and its own frame is found by bp. */
	if (FP_INTERPRETED_OVERLAPS && frame->sender <= bp && bp - frame->sender <= FP_FRAME_BYTES_MAX)
		frame->sender = bp + 16;
	frame->word = fp_interpreted_word(method, bytecode);
	return true;
}

/* The caller's pc of an interpreted frame of a former walk, if the frame's words are what they were then; else 0. */
FP_CHECKED_BY_ITSELF __u64 fp_repeat_interpreted(struct fp_walk *walk, __u32 half, __u32 at)
{
	const struct fp_step *step, *caller;
	struct fp_interpreted frame = {};

	if (!walk)
		return 0;
	step = fp_step_at(walk, half, at);
	caller = fp_step_at(walk, half, at + 1);
	if (!fp_read_interpreted(walk, step->bp, &frame) || frame.word != *fp_word_at(walk, half, at))
		return 0;
	if (frame.sender != fp_sp_of(walk, half, caller) || frame.bp != caller->bp)
		return 0;
	return frame.pc;
}

/* Goes to the caller; the return address and bp lie right below its stack pointer. */
static __always_inline __u32 fp_hotspot_caller(struct fp_walk *walk, __u64 cfa)
{
	__u64 pc, bp;

	if (!fp_read_word(walk, cfa - 16, &bp) || !fp_read_word(walk, cfa - 8, &pc))
		return FP_END_READ_FAULT;
	walk->now_bp_at = -16;
	walk->pc = fp_code_address(pc);
	walk->sp = cfa;
	walk->bp = bp;
	return FP_END_NONE;
}

/* An interpreted frame. */
static __always_inline __u32 fp_step_interpreted(struct fp_walk *walk)
{
	struct fp_interpreted frame = {};
	__u64 bp = walk->bp, sp = walk->sp;
	struct fp_step *step;

	/* A frame pointer that is far off, or a caller below the frame, is not an interpreter's. The caller's sp may lie right above bp, where
	 * the return address is: a method handle's linker takes its last argument off the stack. */
	if (bp < sp || bp - sp > FP_FRAME_BYTES_MAX || !fp_read_interpreted(walk, bp, &frame) || frame.sender <= bp ||
	    frame.sender - bp > FP_FRAME_BYTES_MAX) {
		fp_append(walk, walk->pc | (__u64)FP_FRAME_KIND_JAVA_STUB << FP_FRAME_KIND_BIT | (__u64)walk->flags << 32);
		return FP_END_JIT;
	}
	if (walk->flags & FP_FRAME_EXACT >> 32) {
		/* It has not saved the bytecode's address. */
		frame.word &= ~((1ULL << FP_FRAME_BYTECODE_BITS) - 1);
		if (walk->registers == FP_REGS_LEAF)
			frame.word |= walk->leaf[FP_INTERPRETER_REGISTER] & ((1ULL << FP_FRAME_BYTECODE_BITS) - 1);
		walk->now_repeatable = 0;
	}
	step = fp_append(walk, frame.word);
	walk->pc = fp_code_address(frame.pc);
	walk->sp = frame.sender;
	walk->bp = frame.bp;
	fp_step_done(walk, step, 0, walk->now_repeatable | FP_STEP_USES_BP);
	return FP_END_NONE;
}

/* The frame of a blob: by its size, and where it has none by bp. */
static __always_inline __u32 fp_step_blob(struct fp_walk *walk, const struct fp_hotspot *jvm, __u64 blob)
{
	__u64 pc = walk->pc, flags = (__u64)walk->flags << 32, name, bytes, original = 0, cfa, word, id_at = 0;
	__u32 uses_bp = 0, slot, end;
	struct fp_step *step;

	name = fp_head_word(walk, jvm->at_name);
	bytes = 8ULL * fp_head_number(walk, jvm->at_frame_size);
	word = pc | (__u64)FP_FRAME_KIND_JAVA_STUB << FP_FRAME_KIND_BIT;
	if (name && (name == jvm->name_nmethod || name == jvm->name_native) &&
	    !bpf_probe_read_user(walk->head, FP_HOTSPOT_METHOD_BYTES, (void *)(blob + jvm->at_method))) {
		/* The callee of a frame that is to be deoptimised returns to a handler; the frame contains the original return address. */
		if (pc == fp_head_address(walk, jvm, blob, jvm->at_deopt) ||
		    (jvm->at_deopt_mh != FP_HOTSPOT_NONE && pc == fp_head_address(walk, jvm, blob, jvm->at_deopt_mh))) {
			slot = fp_head_number(walk, jvm->at_original_pc);
			if (slot < FP_FRAME_BYTES_MAX && fp_read_word(walk, walk->sp + slot, &original) && original > blob &&
			    original - blob < FP_FRAME_BYTES_MAX)
				pc = original;
			walk->now_repeatable = 0;
		}
		if (pc - jvm->code_begin < 1ULL << FP_FRAME_CODE_BITS)
			word = (__u64)FP_FRAME_KIND_JAVA_COMPILED << FP_FRAME_KIND_BIT |
			       (__u64)(fp_head_number(walk, jvm->at_compile_id) & ((1U << FP_FRAME_COMPILE_BITS) - 1)) << FP_FRAME_CODE_BITS |
			       (pc - jvm->code_begin);
		id_at = blob + jvm->at_method + jvm->at_compile_id;
	} else if (pc - jvm->barrier_begin < jvm->barrier_end - jvm->barrier_begin) {
		/* bp may have any value there. */
		bytes = jvm->barrier_frame_bytes ?: FP_FRAME_BYTES_MAX + 1;
	}
	step = fp_append(walk, word | flags);
	if (bytes > FP_FRAME_BYTES_MAX)
		return FP_END_JIT;
	if (!bytes || walk->pc == jvm->call_stub_return) {
		if ((walk->bp & 7) || walk->bp < walk->sp || walk->bp - walk->sp > FP_FRAME_BYTES_MAX)
			return FP_END_JIT;
		cfa = walk->bp + 16;
		uses_bp = FP_STEP_USES_BP;
	} else {
		cfa = walk->sp + bytes;
		if (FP_FRAME_KIND(word) == FP_FRAME_KIND_JAVA_COMPILED && walk->now_repeatable && !(walk->flags & FP_FRAME_EXACT >> 32))
			fp_keep_code(walk, word, id_at, bytes);
	}
	end = fp_hotspot_caller(walk, cfa);
	fp_step_done(walk, step, walk->now_bp_at, (end == FP_END_NONE ? walk->now_repeatable : 0) | uses_bp);
	return end;
}

/* One frame in a JVM's code cache: appends it, and steps to its caller. */
FP_CHECKED_BY_ITSELF __u32 fp_step_hotspot(struct fp_walk *walk)
{
	const struct fp_hotspot *jvm;
	__u64 blob, word = 0;
	__u32 bytes = 0, end;
	struct fp_step *step;
	bool is_exact;

	if (!walk)
		return FP_END_UNSUPPORTED;
	if (walk->interpreter_end && fp_find_code(walk, &word, &bytes)) {
		walk->now_bp_at = 0;
		step = fp_append(walk, word | (__u64)walk->flags << 32);
		end = fp_hotspot_caller(walk, walk->sp + bytes);
		fp_step_done(walk, step, walk->now_bp_at, end == FP_END_NONE ? FP_STEP_REPEATABLE : 0);
		walk->registers = FP_REGS_NONE;
		walk->flags = 0;
		return end;
	}
	jvm = fp_hotspot_of(walk);
	if (!jvm)
		return FP_END_NO_TABLE;
	walk->code_begin = jvm->code_begin;
	walk->interpreter_begin = jvm->interpreter_begin;
	walk->interpreter_end = jvm->interpreter_end;
	walk->bytecode_below = jvm->bytecode_below;
	is_exact = walk->flags & FP_FRAME_EXACT >> 32;
	walk->now_repeatable = FP_STEP_REPEATABLE;
	walk->now_bp_at = 0;
	if (walk->pc - jvm->interpreter_begin < jvm->interpreter_end - jvm->interpreter_begin) {
		end = fp_step_interpreted(walk);
	} else {
		blob = fp_find_blob(walk, jvm);
		if (!blob) {
			fp_append(walk, walk->pc | (__u64)FP_FRAME_KIND_JAVA_STUB << FP_FRAME_KIND_BIT | (__u64)walk->flags << 32);
			return FP_END_JIT;
		}
		end = fp_step_blob(walk, jvm, blob);
	}
	walk->registers = FP_REGS_NONE;
	/* A frame that was interrupted may be incomplete, so its caller is a guess. */
	walk->flags = is_exact ? FP_FRAME_GUESSED >> 32 : 0;
	return end;
}

#endif
