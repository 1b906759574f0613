/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* The programs' state of a thread between its probes. */
#ifndef FRAGPROF_THREAD_BPF_H
#define FRAGPROF_THREAD_BPF_H

#include "maps.bpf.h"
#include "unwind.bpf.h"

/* One open allocator call of a thread. */
struct fp_call {
	__u64 sp;       /* stack pointer at entry */
	__u64 size;     /* bytes requested */
	__u64 ptr;      /* the block passed (realloc, xallocx), or where the result is stored (posix_memalign) */
	__u64 stack;    /* stack hash taken at entry */
	__u64 sequence; /* of the thread: pairs a return with its entry */
#ifdef FP_LEGACY
	__u64 cookie;   /* of the entry's site: a return probe does not know its location */
#endif
};

/* The open calls of a thread, as one set of probes sees them. */
struct fp_calls {
	struct fp_call open[FP_CALLS_MAX];
	__u32 epoch;      /* of the probes for large blocks at which they were entered (struct fp_target) */
	__u32 depth;      /* number of them */
	__u32 slot;       /* of the target whose probes saw the last one: its stack is defined for that target alone */
};

/* The state of a thread: its open calls, and its last walk. One value, because the lookup costs more than anything else done with it.
 * It exists as long as the thread; only the thread itself accesses it, and uprobe programs do not nest within a thread, so there is no
 * locking. 8 KiB per thread that ever allocated while it was watched. */
struct fp_thread {
	struct fp_calls calls;       /* by the probes of all entry points */
	struct fp_calls large_calls; /* by the probes for large blocks: both sets of probes may be attached to the same
	                              * functions, and a call is open in each of them separately */
	__u64 sequence;
	__u64 trampoline; /* address of the return trampoline, 0 = not read yet */
	__u32 tid;        /* kernel thread id */
	__u32 pad;
	struct fp_walk walk;
};

/* The open calls of one set of probes. `large` is a constant wherever this is used. */
static __always_inline struct fp_calls *fp_calls_of(struct fp_thread *thread, bool large)
{
	return large ? &thread->large_calls : &thread->calls;
}

#ifdef FP_LEGACY
/* Thread state by thread id; an entry is removed with its thread (fp_exit_done). Preallocated, because tracing programs of these
 * kernels must not allocate: 2048 threads x 8 KiB = 16 MiB; calls of further threads are counted (FP_CNT_NO_THREAD_STATE). */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2048);
	__type(key, __u32);
	__type(value, struct fp_thread);
} threads SEC(".maps");

/* Zeros, from which a new entry is copied. Never written. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct fp_thread);
} new_thread SEC(".maps");

/* The cookies, which newer kernels keep with the probe. 64 sites of each of 1024 processes; 32 bytes per entry. Written by the daemon
 * before the site's probe is attached, removed after it is detached. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct fp_site);
	__type(value, __u64);
} site_cookies SEC(".maps");

static __always_inline struct fp_thread *fp_thread_find(void)
{
	__u32 tid = (__u32)bpf_get_current_pid_tgid();

	return bpf_map_lookup_elem(&threads, &tid);
}

/* The current thread's state; NULL, counted for the target, if there is no memory for it. */
static __always_inline struct fp_thread *fp_thread_of_current(const struct fp_target *target)
{
	__u32 tid = (__u32)bpf_get_current_pid_tgid(), zero = 0;
	struct fp_thread *thread = bpf_map_lookup_elem(&threads, &tid), *blank;

	if (!thread) {
		blank = bpf_map_lookup_elem(&new_thread, &zero);
		if (blank && !bpf_map_update_elem(&threads, &tid, blank, BPF_ANY))
			thread = bpf_map_lookup_elem(&threads, &tid);
	}
	if (!thread)
		fp_count(target, FP_CNT_NO_THREAD_STATE);
	else if (!thread->tid)
		thread->tid = tid;
	return thread;
}

static __always_inline void fp_thread_forget(__u32 tid)
{
	bpf_map_delete_elem(&threads, &tid);
}

__noinline int fp_legacy_step(__u32 i)
{
	struct fp_thread *thread = fp_thread_find();
	struct fp_walk_loop loop;

	if (!thread)
		return 1;
	loop.walk = &thread->walk;
	return fp_walk_loop(i, &loop);
}

__noinline __u32 fp_legacy_unwind(__u32 mm_id)
{
	struct fp_thread *thread = fp_thread_find();

	return thread ? fp_unwind(&thread->walk, mm_id) : 0;
}

/* The cookie of the current probe's site; if it is not one of ours, a cookie whose slot does not exist. */
static __always_inline __u64 fp_cookie(struct pt_regs *regs, bool large)
{
	struct fp_site site = { .tgid = bpf_get_current_pid_tgid() >> 32, .large = large, .ip = FP_PC(regs) };
	__u64 *cookie = bpf_map_lookup_elem(&site_cookies, &site);

	return cookie ? *cookie : ~0ULL;
}

/* The cookie of the open call whose frame the stack pointer has just left; 0 if the return is of a nested call. */
static __always_inline __u64 fp_cookie_of_return(struct pt_regs *regs, bool large)
{
	struct fp_thread *thread = fp_thread_find();
	struct fp_calls *calls;
	__u32 top;

	if (!thread)
		return 0;
	calls = fp_calls_of(thread, large);
	top = calls->depth - 1;
	return top < FP_CALLS_MAX && calls->open[top].sp + FP_RETURN_POPS == FP_SP(regs) ? calls->open[top].cookie : 0;
}
#else
/* Linux 7.2 refused task storage for a value of 10,968 bytes; 8 KiB is kmalloc_nolock's maximum. The rest is for the kernel's own header
 * (struct bpf_local_storage_elem). */
_Static_assert(sizeof(struct fp_thread) <= 8192 - 128, "a thread's state does not fit into task storage");

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_thread);
} threads SEC(".maps");

static __always_inline struct fp_thread *fp_thread_find(void)
{
	return bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, 0);
}

/* The current thread's state; NULL, counted for the target, if there is no memory for it. */
static __always_inline struct fp_thread *fp_thread_of_current(const struct fp_target *target)
{
	struct fp_thread *thread;

	thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!thread)
		fp_count(target, FP_CNT_NO_THREAD_STATE);
	else if (!thread->tid)
		thread->tid = (__u32)bpf_get_current_pid_tgid();
	return thread;
}

/* The state is removed with the task. */
static __always_inline void fp_thread_forget(__u32 tid)
{
}

static __always_inline __u64 fp_cookie(struct pt_regs *regs, bool large)
{
	return bpf_get_attach_cookie(regs);
}

static __always_inline __u64 fp_cookie_of_return(struct pt_regs *regs, bool large)
{
	return bpf_get_attach_cookie(regs);
}
#endif
#endif
