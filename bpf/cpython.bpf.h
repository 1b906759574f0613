/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The Python frames of a thread of a CPython.
 *
 * They are read at each walk, after the native frames and apart from them: bytecode calls bytecode without any change of the native stack, so
 * what a repeated walk (unwind_repeat.bpf.h) proves does not include them. Each frame is an element of the thread state's list:
 *
 *   3.8, 3.9   thread -> frame object -> frame object ...            one for each call of the evaluation loop
 *   3.10       the same; thread -> CFrame -> CFrame ...              a CFrame lies in the C frame of each call
 *   3.11       thread -> _PyCFrame -> frame -> frame ...             a call's outermost frame is marked; its _PyCFrame is in its C frame
 *   3.12 on    thread (3.12: _PyCFrame) -> frame -> frame -> shim    a call's frames end at a shim, which is in its C frame
 *
 * What lies in a C frame tells which native frame it is, by the stack pointers. For 3.8 and 3.9 the daemon pairs the loop's native frames
 * and the Python frames in turn.
 *
 * Reading user memory takes 60 to 100 ns however little is read, so frames are read through the walk's window: most lie next to each other. The
 * code object of a frame that the thread's last walk contained too is not read again.
 *
 * A code object is known by its address and by what it says: its texts are sent when a stack first contains it (cpython_send.bpf.h), because
 * code objects are freed, those of modules right after their import.
 *
 * Whatever a process writes there, a walk reads a bounded number of words of its memory.
 */
#ifndef FRAGPROF_CPYTHON_BPF_H
#define FRAGPROF_CPYTHON_BPF_H

#include "unwind_walk.bpf.h"

/* A bound for each loop: thread states and interpreters that are searched for the thread's own; frames and shims between them. */
#define FP_PYTHON_SEARCH_MAX 2048
#define FP_PYTHON_STEPS_MAX (2 * FP_PYTHON_FRAMES_MAX)

/* States of a thread: one in each interpreter in which it runs. */
#define FP_PYTHON_THREADS_MAX 4

/* Instructions before the first traceable one are 2 bytes each. */
#define FP_PYTHON_UNIT 2

/* Frames that are remembered from walk to walk, by address. */
#define FP_PYTHON_SEEN_MAX 128

/* A frame of the last walk, or of this one. */
struct fp_python_seen {
	__u64 frame;
	__u64 code;
	__u64 identity;         /* what the code object is recognised by */
	__u32 first_traceable;
	__u32 walk;             /* number of the last walk that contained it */
};

/* State of a thread of a process with CPython. It is in the thread's own storage: see struct fp_walk. */
struct fp_python_walk {
	struct fp_python layout;
	__u64 native_hash;      /* the hash of the native walk */
	__u64 hash;             /* the hash of both */
	__u64 self;             /* the thread pointer */
	__u64 threads[FP_PYTHON_THREADS_MAX]; /* the thread's states: of the newest interpreter first */
	__u64 frame;            /* to be read next */
	__u64 cframe;
	__u64 frames_hash;
	__u64 interpreter;      /* while searching: the next interpreter, and the thread state to be compared */
	__u64 searched;
	__u32 found;            /* number of the thread's states */
	__u32 read;             /* of them, whose frames are read or being read */
	__u32 is_alone;         /* there was one interpreter only when they were found */
	__u32 pad;
	__u32 generation;       /* of the tables, and the address space, with which layout was read */
	__u32 mm_id;
	__u32 call_begin;       /* first frame of the current call of the loop */
	__u32 len;
	__u32 end;              /* enum fp_python_end */
	__u32 walks;            /* number of this walk */
	__u32 window_bytes;     /* of walk->window that are valid */
	__u32 at;               /* word of walk->window at which the current frame begins */
	__u8 code[256];         /* the thread state or the code object that is read */
	struct fp_python_seen seen[FP_PYTHON_SEEN_MAX];
	struct fp_python_stack record;
	struct fp_python_frame frames[FP_PYTHON_FRAMES_MAX];
};

/* A page, which is mapped as a whole. */
#define FP_PYTHON_PAGE 4096

/* Makes walk->window contain a frame; the frames that called it lie mostly below. */
static __always_inline bool fp_read_frame(struct fp_walk *walk, struct fp_python_walk *python, __u64 frame)
{
	__u64 distance = frame - walk->window_base, end, base;
	__u32 bytes = python->layout.frame_bytes;

	if (bytes > FP_PYTHON_FRAME_BYTES || (frame & 7))
		return false;
	if (distance > sizeof(walk->window) || distance + bytes > python->window_bytes) {
		end = frame + bytes;
		base = end - sizeof(walk->window);
		/* Not into another page, unless the frame itself lies in two. */
		if (base < (frame & ~(FP_PYTHON_PAGE - 1ULL)))
			base = frame & ~(FP_PYTHON_PAGE - 1ULL);
		if (base + sizeof(walk->window) > ((end - 1) | (FP_PYTHON_PAGE - 1)) + 1)
			base = end - sizeof(walk->window);
		base &= ~7ULL;
		walk->window_base = ~0ULL;
		python->window_bytes = 0;
		if (bpf_probe_read_user(walk->window, sizeof(walk->window), (void *)base))
			return false;
		walk->window_base = base;
		python->window_bytes = sizeof(walk->window);
		distance = frame - base;
	}
	python->at = (__u32)distance >> 3;
	return true;
}

/* Fields of the frame and of the code object that were read. */
static __always_inline __u64 fp_frame_word(const struct fp_walk *walk, const struct fp_python_walk *python, __u32 field)
{
	return walk->window[(python->at + (field >> 3)) & (FP_WINDOW_WORDS - 1)];
}

static __always_inline __u8 fp_frame_byte(const struct fp_walk *walk, const struct fp_python_walk *python, __u32 field)
{
	return fp_frame_word(walk, python, field) >> 8 * (field & 7);
}

static __always_inline __u64 fp_code_word(const struct fp_python_walk *python, __u32 at)
{
	return *(const __u64 *)(python->code + (at & 0xf8));
}

static __always_inline __u32 fp_code_number(const struct fp_python_walk *python, __u32 at)
{
	return at == FP_PYTHON_NONE ? 0 : *(const __u32 *)(python->code + (at & 0xfc));
}

static __always_inline __u64 fp_user_word(__u64 address)
{
	__u64 word = 0;

	bpf_probe_read_user(&word, sizeof(word), (void *)address);
	return word;
}

/* Reads a code object. Returns what it is recognised by; 0 = it could not be read. */
static __always_inline __u64 fp_read_code(struct fp_python_walk *python, __u64 code)
{
	const struct fp_python *layout = &python->layout;
	__u32 bytes = layout->code_bytes;
	__u64 identity;

	if (bytes > FP_PYTHON_CODE_BYTES)
		return 0;
	barrier_var(bytes);
	if (bpf_probe_read_user(python->code, bytes & 0xff, (void *)code))
		return 0;
	identity = fp_code_word(python, layout->code_name) * 0x9e3779b97f4a7c15ULL;
	identity = (identity ^ identity >> 29 ^ fp_code_word(python, layout->code_file)) * 0xbf58476d1ce4e5b9ULL;
	identity = (identity ^ identity >> 32 ^ fp_code_word(python, layout->code_lines)) * 0x94d049bb133111ebULL;
	identity ^= identity >> 31;
	identity += (__u64)fp_code_number(python, layout->code_version) << 32 | fp_code_number(python, layout->code_first_line);
	return identity ?: 1;
}

/* Whether an address is in the evaluation loop. */
static __always_inline bool fp_python_in_loop(const struct fp_python *layout, __u64 pc)
{
	return pc - layout->eval_begin < layout->eval_end - layout->eval_begin ||
	       pc - layout->cold_begin < layout->cold_end - layout->cold_begin;
}

/* The native frame in whose C frame an address lies. */
static __always_inline __u32 fp_python_native(struct fp_walk *walk, const struct fp_python_walk *python, __u64 address)
{
	__u64 distance = address - walk->first_sp[walk->now & 1], pc;
	__u32 near, low = 0, len = walk->len, step;

	if (distance >= 8ULL * FP_SP_FAR || !len)
		return FP_PYTHON_UNKNOWN;
	near = distance >> 3;
#pragma unroll
	for (step = FP_FRAMES_MAX / 2; step; step /= 2) {
		__u32 try = low + step;

		if (try < len && fp_step_at(walk, walk->now, try)->sp <= near)
			low = try;
	}
	/* Where the last frame ends is known only if there is one that follows it. */
	if (low + 1 >= len && walk->end != FP_END_COMPLETE) {
		pc = *fp_word_at(walk, walk->now, low) & FP_FRAME_ADDR_MASK;
		if (!fp_python_in_loop(&python->layout, pc))
			return FP_PYTHON_OUTSIDE;
		if (walk->end == FP_END_FRAME_LIMIT && address >= walk->sp)
			return FP_PYTHON_OUTSIDE;
	}
	return low;
}

/* A call of the evaluation loop has no more frames. address: in its C frame; 0 = not known. */
static __always_inline void fp_python_call_done(struct fp_walk *walk, struct fp_python_walk *python, __u64 address)
{
	__u32 last = python->len - 1, native;

	if (python->len == python->call_begin || last >= FP_PYTHON_FRAMES_MAX)
		return;
	native = address ? fp_python_native(walk, python, address) : FP_PYTHON_UNKNOWN;
	python->frames[last].native = native;
	python->frames[last].flags |= FP_PYTHON_OUTERMOST;
	python->frames_hash = (python->frames_hash ^ native) * 0x9e3779b97f4a7c15ULL;
	python->call_begin = python->len;
}

/* Appends a frame of a code object, unless the interpreter itself does not show it: one that has not begun, or that the interpreter made for
 * itself (_PyFrame_IsIncomplete). */
static __always_inline void fp_python_append(struct fp_walk *walk, struct fp_python_walk *python, __u64 frame, __u64 code)
{
	const struct fp_python *layout = &python->layout;
	struct fp_python_seen *seen = &python->seen[(frame >> 4 ^ frame >> 10) & (FP_PYTHON_SEEN_MAX - 1)];
	struct fp_python_frame *out;
	__u64 instruction, hash;
	__u32 at = python->len;
	__s32 index;

	if (seen->frame != frame || seen->code != code || seen->walk + 1 != python->walks || !seen->identity) {
		seen->frame = frame;
		seen->code = code;
		seen->identity = fp_read_code(python, code);
		seen->first_traceable = fp_code_number(python, layout->code_first_traceable);
	}
	seen->walk = python->walks;
	instruction = fp_frame_word(walk, python, layout->frame_instruction);
	if (layout->shape >= FP_PYTHON_ENTRIES) {
		instruction -= code + layout->code_bytecode;
		index = (__s64)instruction != (__s32)instruction ? -1 : (__s32)instruction;
		if (seen->identity && fp_frame_byte(walk, python, layout->frame_owner) != layout->owner_generator &&
		    index < (__s32)(FP_PYTHON_UNIT * seen->first_traceable))
			return;
	} else {
		index = (__s32)(instruction >> 8 * (layout->frame_instruction & 4));
	}
	barrier_var(at);
	if (at >= FP_PYTHON_FRAMES_MAX)
		return;
	out = &python->frames[at];
	out->code = code;
	out->instruction = index;
	out->native = FP_PYTHON_UNKNOWN;
	out->flags = seen->identity ? 0 : FP_PYTHON_UNREADABLE;
	python->len = at + 1;
	hash = (python->frames_hash ^ code ^ (__u64)index << 40) * 0x9e3779b97f4a7c15ULL;
	hash = (hash ^ hash >> 32 ^ seen->identity) * 0xbf58476d1ce4e5b9ULL;
	python->frames_hash = hash ^ hash >> 29;
}

struct fp_python_loop {
	struct fp_walk *walk;
	struct fp_python_walk *python;
};

/* Goes to the innermost frame of the thread's next state. False if there is no other, or it is not this thread's. */
static __always_inline bool fp_python_next_thread(struct fp_python_walk *python)
{
	const struct fp_python *layout = &python->layout;

	if (python->read >= python->found || python->read >= FP_PYTHON_THREADS_MAX)
		return false;
	if (bpf_probe_read_user(python->code, FP_PYTHON_THREAD_BYTES,
				(void *)python->threads[python->read & (FP_PYTHON_THREADS_MAX - 1)]))
		return false;
	if (!fp_is_thread_self(fp_code_word(python, layout->thread_id), python->self))
		return false;
	python->read += 1;
	python->call_begin = python->len;
	if (layout->thread_frame != FP_PYTHON_NONE)
		python->frame = fp_code_word(python, layout->thread_frame);
	if (layout->thread_cframe != FP_PYTHON_NONE) {
		python->cframe = fp_code_word(python, layout->thread_cframe);
		if (layout->cframe_frame != FP_PYTHON_NONE)
			python->frame = fp_user_word(python->cframe + layout->cframe_frame);
	}
	return true;
}

/* One frame. */
static long fp_python_step(__u32 i, struct fp_python_loop *loop)
{
	struct fp_python_walk *python = loop->python;
	struct fp_walk *walk = loop->walk;
	const struct fp_python *layout = &python->layout;
	__u64 frame = python->frame;

	if (!frame)
		return !fp_python_next_thread(python);
	/* A limit above the usual one is of native frames only. */
	if (python->len >= FP_PYTHON_FRAMES_MAX || (fp_frames_limit < FP_FRAMES_MAX && python->len >= fp_frames_limit)) {
		python->end = FP_PYTHON_END_LIMIT;
		return 1;
	}
	if (!fp_read_frame(walk, python, frame)) {
		python->end = FP_PYTHON_END_UNREADABLE;
		return 1;
	}
	python->frame = fp_frame_word(walk, python, layout->frame_previous);
	if (layout->shape == FP_PYTHON_SHIMS && fp_frame_byte(walk, python, layout->frame_owner) >= layout->owner_shim) {
		fp_python_call_done(walk, python, frame);
		return 0;
	}
	/* The low bits are a tag from 3.14 on. */
	fp_python_append(walk, python, frame, fp_frame_word(walk, python, layout->frame_code) & ~7ULL);
	switch (layout->shape) {
	case FP_PYTHON_OBJECTS:
		fp_python_call_done(walk, python, 0);
		break;
	case FP_PYTHON_ENTRIES:
		if (!fp_frame_byte(walk, python, layout->frame_entry))
			break;
		/* fall through */
	case FP_PYTHON_OBJECTS_CFRAME:
		fp_python_call_done(walk, python, python->cframe);
		python->cframe = fp_user_word(python->cframe + layout->cframe_previous);
		break;
	}
	return 0;
}

/* Compares one thread state, or goes to the next interpreter. */
static long fp_python_search(__u32 i, struct fp_python_loop *loop)
{
	struct fp_python_walk *python = loop->python;

	if (!python->searched) {
		if (!python->interpreter || python->found >= FP_PYTHON_THREADS_MAX)
			return 1;
		python->searched = fp_user_word(python->interpreter + python->layout.interpreter_threads);
		python->interpreter = fp_user_word(python->interpreter + python->layout.interpreter_next);
		return 0;
	}
	if (fp_is_thread_self(fp_user_word(python->searched + python->layout.thread_id), python->self)) {
		python->threads[python->found & (FP_PYTHON_THREADS_MAX - 1)] = python->searched;
		python->found += 1;
		python->searched = 0;
		return 0;
	}
	python->searched = fp_user_word(python->searched + python->layout.thread_next);
	return 0;
}

struct fp_python_scan {
	struct fp_walk *walk;
	struct fp_python_walk *python;
	__u64 found;
};

static long fp_python_scan(__u32 i, struct fp_python_scan *scan)
{
	if (i >= scan->walk->len)
		return 1;
	scan->found = fp_python_in_loop(&scan->python->layout, *fp_word_at(scan->walk, scan->walk->now, i) & FP_FRAME_ADDR_MASK);
	return scan->found;
}

/* Finds the states of the current thread, if the evaluation loop is on its stack. */
static __always_inline void fp_python_find_threads(struct fp_walk *walk, struct fp_python_walk *python)
{
	const struct fp_python *layout = &python->layout;
	struct fp_python_scan scan = { .walk = walk, .python = python };
	struct fp_python_loop loop = { .walk = walk, .python = python };

	python->found = 0;
	bpf_loop(FP_FRAMES_MAX, fp_python_scan, &scan, 0);
	if (!scan.found)
		return;
	python->interpreter = fp_user_word(layout->interpreters);
	python->is_alone = !fp_user_word(python->interpreter + layout->interpreter_next);
	python->searched = 0;
	bpf_loop(FP_PYTHON_SEARCH_MAX, fp_python_search, &loop, 0);
	if (!python->found)
		python->end = FP_PYTHON_END_NO_THREAD;
}

static __always_inline void fp_python_read(struct fp_walk *walk, struct fp_python_walk *python)
{
	struct fp_python_loop loop = { .walk = walk, .python = python };

	python->len = 0;
	python->call_begin = 0;
	python->frames_hash = 0;
	python->frame = 0;
	python->cframe = 0;
	python->read = 0;
	python->end = FP_PYTHON_END_COMPLETE;
	bpf_loop(FP_PYTHON_STEPS_MAX, fp_python_step, &loop, 0);
	if (python->frame && python->end == FP_PYTHON_END_COMPLETE)
		python->end = FP_PYTHON_END_LIMIT;
}

/* Reads the Python frames of the current thread, whose native frames are in walk. */
static __always_inline void fp_python_frames(struct fp_walk *walk, struct fp_python_walk *python)
{
	walk->window_base = ~0ULL;
	python->window_bytes = 0;
	python->walks += 1;
	/* A state that was found earlier may be in freed memory, which still names the thread; then it has no frames. */
	fp_python_read(walk, python);
	if (python->len && python->is_alone)
		return;
	fp_python_find_threads(walk, python);
	if (python->found)
		fp_python_read(walk, python);
}

/* Adds the Python frames to a walk that has just been taken: its hash covers both. */
static __always_inline void fp_python_add(struct fp_walk *walk, struct fp_python_walk *python, __u64 self)
{
	__u64 hash;

	/* A walk that was proven unchanged still has the hash of both. */
	if (walk->hash != python->hash || !python->hash)
		python->native_hash = walk->hash;
	python->self = self;
	fp_python_frames(walk, python);
	hash = python->native_hash;
	if (python->len || python->end)
		hash ^= (python->frames_hash + python->end + 1) * 0xff51afd7ed558ccdULL;
	if (!hash)
		hash = 1;
	if (walk->hash != hash)
		walk->defined = 0;
	walk->hash = hash;
	python->hash = hash;
}

#endif
