// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/* The unwinder alone, for comparing its stacks with a debugger's and for measuring it. */
#include "../../bpf/unwind.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* The last stack, for a test that stops the target at the probe. */
struct last_stack {
	__u64 hash;
	__u64 walks;
	__u64 need_pc;
	__u32 len;
	__u32 end;
	__u64 frames[FP_FRAMES_MAX];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct last_stack);
} last SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_walk);
} walks SEC(".maps");

static __always_inline struct fp_walk *unwind_user(struct pt_regs *regs)
{
	struct fp_walk *walk = bpf_task_storage_get(&walks, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (walk) {
		unwind_into(walk, regs, bpf_get_current_pid_tgid() >> 32, FP_SP(regs));
		fp_count_walk(walk, 0);
	}
	return walk;
}

SEC("uprobe")
int walk_and_copy(struct pt_regs *regs)
{
	__u32 zero = 0, i;
	struct last_stack *out = bpf_map_lookup_elem(&last, &zero);
	struct fp_walk *walk;

	fp_stay_on_the_threads_stack(regs);
	walk = unwind_user(regs);
	if (!out || !walk)
		return 0;
	out->hash = walk->hash;
	out->len = walk->len;
	out->end = walk->end;
	out->need_pc = walk->need_pc;
	for (i = 0; i < FP_FRAMES_MAX; i++)
		out->frames[i] = *fp_word_at(walk, walk->now, i);
	out->walks++;
	return 0;
}

SEC("uprobe")
int walk_only(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	unwind_user(regs);
	return 0;
}

SEC("uprobe")
int empty(struct pt_regs *regs)
{
	return 0;
}
