/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The differences between kernels, in one place.
 *
 * The programs are compiled twice. The ordinary object uses what tracing programs have since 5.17: task storage, pointers to the
 * current task with known type, attach cookies, bpf_loop. With FP_LEGACY the same programs do without, for 5.8 to 5.16: a hash table
 * by thread id, reads through bpf_probe_read_kernel, cookies by address, and a loop around a function that the verifier checks by
 * itself. Two objects rather than a choice at load time, because old verifiers refuse the new instructions even where they are never
 * reached. Each is slower (docs/kernels.md); none is less exact.
 */
#ifndef FRAGPROF_KERNEL_BPF_H
#define FRAGPROF_KERNEL_BPF_H

#include "vmlinux.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

/*
 * To be called by each program that runs at a uprobe. From 6.13 on the kernel gives programs a stack of their own for each CPU
 * (bpf_enable_priv_stack, kernel/bpf/verifier.c), and programs of uprobes can be preempted. On a kernel with full preemption another
 * thread then runs the same program on the same stack, and they overwrite each other's data: on 7.2 the kernel followed such pointers and
 * killed the thread. A program that contains a tail call has no such stack. This one is never executed: the verifier knows that `never` is
 * false and removes it.
 */
static __always_inline void fp_stay_on_the_threads_stack(void *context)
{
	__u64 never = 0;

	barrier_var(never);
	if (never)
		bpf_tail_call(context, NULL, 0);
}

#ifdef FP_LEGACY

/* The current task; its fields only through FP_KERNEL. */
static __always_inline struct task_struct *fp_current_task(void)
{
	return (struct task_struct *)bpf_get_current_task();
}

/* A field of a kernel object, along a path of pointers. 0 where one of them is null. */
#define FP_KERNEL(object, ...) BPF_CORE_READ(object, __VA_ARGS__)

#else

static __always_inline struct task_struct *fp_current_task(void)
{
	return bpf_get_current_task_btf();
}

#define FP_KERNEL_1(object, a) ((object)->a)
#define FP_KERNEL_2(object, a, b) ((object)->a->b)
#define FP_KERNEL_PICK(_1, _2, name, ...) name
#define FP_KERNEL(object, ...) FP_KERNEL_PICK(__VA_ARGS__, FP_KERNEL_2, FP_KERNEL_1)(object, __VA_ARGS__)

#endif
#endif
