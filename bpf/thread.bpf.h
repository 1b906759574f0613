/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* What the programs keep of a thread between its probes. */
#ifndef FRAGPROF_THREAD_BPF_H
#define FRAGPROF_THREAD_BPF_H

#include "maps.bpf.h"
#include "unwind.bpf.h"

/* One open allocator call of a thread. */
struct fp_call {
	__u64 sp;       /* stack pointer at entry: address of the return address */
	__u64 size;     /* bytes asked for */
	__u64 ptr;      /* the block given (realloc, xallocx), or where the result goes (posix_memalign) */
	__u64 stack;    /* stack hash taken at entry */
	__u64 sequence; /* of the thread: pairs a return with its entry */
};

/* What is kept of a thread: its open calls, and its last walk. One piece, because finding it costs more than anything else that is
 * done with it. Lives and dies with the thread; only the thread itself touches it, and uprobe programs do not nest within a thread, so
 * no locking. 11 KiB a thread that ever allocated while it was watched. */
struct fp_thread {
	struct fp_call calls[FP_CALLS_MAX];
	__u64 sequence;
	__u64 trampoline; /* address of the return trampoline, 0 = not read yet */
	__u32 depth;      /* open calls */
	__u32 tid;        /* kernel thread id */
	struct fp_walk walk;
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_thread);
} threads SEC(".maps");

static __always_inline struct fp_thread *fp_thread_of_current(void)
{
	struct fp_thread *thread;

	thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!thread)
		fp_count(FP_CNT_NO_THREAD_STATE);
	else if (!thread->tid)
		thread->tid = (__u32)bpf_get_current_pid_tgid();
	return thread;
}

#endif
