// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * The user registers of one process's threads, as the kernel saved them when each last entered it. Nothing is stopped or attached to the
 * process: the kernel walks its own list of tasks while the iterator's file is read.
 *
 * For a thread that waits in a system call these are its registers. The registers of a running thread are in the CPU, and those read here
 * are from its last entry: they may add stale roots.
 */
#include "vmlinux.h"

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

struct bpf_iter_meta {
	struct seq_file *seq;
} __attribute__((preserve_access_index));

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
} __attribute__((preserve_access_index));

/* The process. */
const volatile __s32 target_tgid = 0;

SEC("iter/task")
int thread_registers(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task;
	struct fp_thread_registers out = {};

	if (!task || task->tgid != target_tgid)
		return 0;
	out.tid = task->pid;
	if (bpf_probe_read_kernel(&out.words, sizeof(out.words), (void *)bpf_task_pt_regs(task)))
		return 0;
	/* Retried by the kernel with a larger buffer if there is not enough space. */
	bpf_seq_write(ctx->meta->seq, &out, sizeof(out));
	return 0;
}
