/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Walks of more than FP_FRAMES_MAX frames, if they are requested.
 *
 * A thread's walk has to fit into task storage, whose values have 8 KiB at most, with what each step read. So a walk that has reached
 * FP_FRAMES_MAX frames puts their words aside, into task storage of its own, and begins to fill the same places again. What is left in them at
 * the end is the outermost part, with which the next walk is compared (unwind_repeat.bpf.h); that is where most stacks are the same.
 *
 * The walk of a process with a CPython ends at FP_FRAMES_MAX as without: its Python frames are placed among its native ones by what their
 * steps read (cpython.bpf.h), which would be gone.
 */
#ifndef FRAGPROF_DEEP_BPF_H
#define FRAGPROF_DEEP_BPF_H

#include "unwind_walk.bpf.h"

/* Groups of FP_FRAMES_MAX frames. */
#define FP_DEEP_GROUPS (FP_FRAMES_DEEP_MAX / FP_FRAMES_MAX)

/* A stack as it is sent. */
struct fp_deep {
	struct fp_stack record;
	__u64 words[FP_FRAMES_DEEP_MAX];
};

_Static_assert(sizeof(struct fp_deep) <= 8192 - 128, "a deep stack does not fit into task storage");

#ifdef FP_HOST
static __thread struct fp_deep deep_of_host;
static struct fp_deep *fp_deep_of_current(void)
{
	return &deep_of_host;
}
#else
/* The deep stack of a thread, only of threads that had one: 8 KiB each. Removed with the task. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_deep);
} deep_stacks SEC(".maps");

static __always_inline struct fp_deep *fp_deep_of_current(void)
{
	return bpf_task_storage_get(&deep_stacks, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
}
#endif

/* Copies the words of the walk's current frames behind those that were put aside. */
static __always_inline bool fp_put_aside(struct fp_walk *walk, struct fp_deep *deep)
{
	__u32 group = walk->before / FP_FRAMES_MAX;

	barrier_var(group);
	if (group >= FP_DEEP_GROUPS)
		return false;
	return !bpf_probe_read_kernel(&deep->words[group * FP_FRAMES_MAX], FP_FRAMES_MAX * sizeof(__u64), fp_word_at(walk, walk->now, 0));
}

/* Makes room for more frames, if more are wanted. Without memory for them the walk ends as one that may not have more. */
FP_CHECKED_BY_ITSELF __u32 fp_deepen(struct fp_walk *walk)
{
	struct fp_deep *deep;

	if (!walk || walk->python || walk->before + walk->len >= fp_frames_limit)
		return 0;
	deep = fp_deep_of_current();
	if (!deep || !fp_put_aside(walk, deep))
		return 0;
	walk->before += FP_FRAMES_MAX;
	walk->len = 0;
	return 1;
}

#ifndef FP_HOST
/* Sends a deep stack, whose record has the head. 0 = it is in the ring. */
static __always_inline long fp_send_deep(struct fp_walk *walk, const struct fp_stack *record, void *ring)
{
	struct fp_deep *deep = fp_deep_of_current();
	__u64 frames = walk->before + walk->len;

	if (!deep)
		return -1;
	fp_put_aside(walk, deep);
	deep->record = *record;
	deep->record.len = frames;
	barrier_var(frames);
	if (frames > FP_FRAMES_DEEP_MAX)
		return -1;
	return bpf_ringbuf_output(ring, deep, sizeof(deep->record) + frames * sizeof(__u64), BPF_RB_NO_WAKEUP);
}
#endif

#endif
