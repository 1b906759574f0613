/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* The stack of the current thread, by frame pointers. */
#ifndef FRAGPROF_UNWIND_BPF_H
#define FRAGPROF_UNWIND_BPF_H

#include "maps.bpf.h"

struct fp_walk {
	__u64 hash;
	__u32 len;
	__u32 end;
	__u32 defined;
	__u32 pad;
	struct fp_stack record; /* with frames behind */
	__u64 frames[FP_FRAMES_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_walk);
} walks SEC(".maps");

static __always_inline struct fp_walk *unwind_user(struct pt_regs *regs, __u32 mm_id)
{
	struct fp_walk *walk = bpf_task_storage_get(&walks, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	__u64 hash = 0xcbf29ce484222325ULL, fp, next[2];
	int i;

	if (!walk) {
		fp_count(FP_CNT_NO_WALK_STATE);
		return NULL;
	}
	walk->frames[0] = regs->ip | FP_FRAME_EXACT;
	walk->len = 1;
	fp = regs->bp;
	for (i = 1; i < 32; i++) {
		if (bpf_probe_read_user(next, sizeof(next), (void *)fp) || !next[1])
			break;
		walk->frames[i] = next[1] & FP_FRAME_ADDR_MASK;
		hash = (hash ^ next[1]) * 0x100000001b3ULL;
		walk->len = i + 1;
		if (next[0] <= fp)
			break;
		fp = next[0];
	}
	walk->end = FP_END_FP_ONLY;
	walk->hash = (hash ^ regs->ip) | 1;
	walk->defined = 0;
	return walk;
}

#endif
