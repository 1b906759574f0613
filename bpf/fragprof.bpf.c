// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * fragprof's BPF programs.
 *
 * They only observe that a watched process allocates, frees, changes its address space, forks, execs or exits; take the call stack of an
 * allocation; and put a record of it into the process's ring buffer. Nothing is aggregated here: a hash table in the kernel would cost
 * more than the record (2.4 us against 2.2 us per malloc/free pair) and could not be corrected afterwards.
 *
 * The price of a probe is its trap: ~0.7 us where the kernel emulates the probed instruction, ~9 us where it must single-step it. So
 * the daemon chooses the instruction (src/probe/placement.rs) and encodes the arguments' locations in the site's cookie; one program
 * serves every entry point of every allocator.
 *
 * Four ways to attach the same functions, best first; the daemon takes what the kernel can do:
 *   session   entry and return in one link, paired by the kernel, returns of nested calls never trap (6.13)
 *   multi     one link for entries, one for returns (6.6)
 *   single    a perf event for each site (5.17, for the attach cookie and bpf_loop)
 *   legacy    the same from this source compiled with FP_LEGACY, sites distinguished by their addresses (5.8; kernel.bpf.h)
 *
 * Everything that is dropped is counted where it is dropped (enum fp_counter). Uprobe programs can be preempted, so nothing between
 * two helper calls may live in per-CPU memory; state is in task storage, where only its own thread can reach it.
 */
#include "vmlinux.h"

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "alloc.bpf.h"
#include "fragprof.h"
#include "large.bpf.h"
#include "lifecycle.bpf.h"
#include "maps.bpf.h"
#include "unwind.bpf.h"
#include "usdt.bpf.h"
#include "vm.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#ifndef FP_LEGACY
/* Linux 7 added an argument to the function. libbpf binds the form that the kernel has; the part after ___ does not belong to the name. */
extern __u64 *bpf_session_cookie(void) __ksym __weak;
extern __u64 *bpf_session_cookie___of_context(void *ctx) __ksym __weak;

/* The session's cookie: 0 at entry, and at return what the entry stored there. */
static __always_inline __u64 *session_cookie(struct pt_regs *regs)
{
	return bpf_ksym_exists(bpf_session_cookie___of_context) ? bpf_session_cookie___of_context(regs) : bpf_session_cookie();
}

SEC("uprobe.session")
int alloc_session(struct pt_regs *regs)
{
	__u64 cookie = bpf_get_attach_cookie(regs), *sequence = session_cookie(regs);

	fp_stay_on_the_threads_stack(regs);
	if (*sequence) {
		fp_alloc_return(regs, cookie, *sequence, false);
		return 0;
	}
	*sequence = fp_alloc_enter(regs, cookie);
	return *sequence ? 0 : 1; /* 1: the kernel does not even set up the return */
}

/* All probes of a window in one link: allocating and freeing sites in one program, distinguished by the cookie. The cost of a window is in
 * its links, which the kernel detaches one by one. */
SEC("uprobe.session")
int window_session(struct pt_regs *regs)
{
	__u64 cookie = bpf_get_attach_cookie(regs), *sequence = session_cookie(regs);

	fp_stay_on_the_threads_stack(regs);
	if (*sequence) {
		fp_alloc_return(regs, cookie, *sequence, false);
		return 0;
	}
	if (FP_COOKIE_OP(cookie) == FP_OP_FREE) {
		fp_free_enter(regs, cookie);
		return 1;
	}
	*sequence = fp_alloc_enter(regs, cookie);
	return *sequence ? 0 : 1;
}

/* All probes for large blocks in one link. */
SEC("uprobe.session")
int large_session(struct pt_regs *regs)
{
	__u64 cookie = bpf_get_attach_cookie(regs), *sequence = session_cookie(regs);

	fp_stay_on_the_threads_stack(regs);
	if (*sequence) {
		fp_alloc_return(regs, cookie, *sequence, true);
		return 0;
	}
	*sequence = fp_large_enter(regs, cookie);
	return *sequence ? 0 : 1;
}

SEC("uprobe.multi")
int large_entry_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_large_enter(regs, bpf_get_attach_cookie(regs));
	return 0;
}

SEC("uretprobe.multi")
int large_return_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_alloc_return(regs, bpf_get_attach_cookie(regs), 0, true);
	return 0;
}

SEC("uprobe.multi")
int alloc_entry_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_alloc_enter(regs, bpf_get_attach_cookie(regs));
	return 0;
}

SEC("uretprobe.multi")
int alloc_return_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_alloc_return(regs, bpf_get_attach_cookie(regs), 0, false);
	return 0;
}

SEC("uprobe.multi")
int free_entry_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_free_enter(regs, bpf_get_attach_cookie(regs));
	return 0;
}

#endif

SEC("uprobe")
int alloc_entry(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_alloc_enter(regs, fp_cookie(regs, false));
	return 0;
}

SEC("uretprobe")
int alloc_return(struct pt_regs *regs)
{
	__u64 cookie = fp_cookie_of_return(regs, false);

	fp_stay_on_the_threads_stack(regs);
	if (cookie)
		fp_alloc_return(regs, cookie, 0, false);
	return 0;
}

SEC("uprobe")
int free_entry(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_free_enter(regs, fp_cookie(regs, false));
	return 0;
}

SEC("uprobe")
int large_entry(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_large_enter(regs, fp_cookie(regs, true));
	return 0;
}

SEC("uretprobe")
int large_return(struct pt_regs *regs)
{
	__u64 cookie = fp_cookie_of_return(regs, true);

	fp_stay_on_the_threads_stack(regs);
	if (cookie)
		fp_alloc_return(regs, cookie, 0, true);
	return 0;
}

#ifndef FP_LEGACY
SEC("uprobe.multi")
int usdt_alloc_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_sample(regs, bpf_get_attach_cookie(regs));
	return 0;
}

SEC("uprobe.multi")
int usdt_free_multi(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_sampled_free(regs, bpf_get_attach_cookie(regs));
	return 0;
}

SEC("uprobe")
int usdt_alloc(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_sample(regs, bpf_get_attach_cookie(regs));
	return 0;
}

SEC("uprobe")
int usdt_free(struct pt_regs *regs)
{
	fp_stay_on_the_threads_stack(regs);
	fp_sampled_free(regs, bpf_get_attach_cookie(regs));
	return 0;
}
#endif

SEC("tp_btf/sys_exit")
int BPF_PROG(vm_change, struct pt_regs *regs, long result)
{
	return fp_syscall_done(regs, result);
}

#ifdef FP_PAGE_FAULT_TRACEPOINT
SEC("tp_btf/page_fault_user")
int BPF_PROG(page_touch, unsigned long address, struct pt_regs *regs, unsigned long error_code)
{
	/* Bit 0: the page was present. */
	return error_code & 1 ? 0 : fp_page_fault(address, regs);
}
#else
/* vm_fault_t handle_mm_fault(struct vm_area_struct *vma, unsigned long address, unsigned int flags, struct pt_regs *regs); regs since 5.9,
 * commit bce617edecad. It does not tell whether the page was present: a page that is read before it is written counts twice. */
SEC("kprobe/handle_mm_fault")
int page_touch(struct pt_regs *regs)
{
	if (!(FP_PARAMETER_2(regs) & FP_FAULT_OF_USER))
		return 0;
	return fp_page_fault(FP_PARAMETER_1(regs), (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf()));
}
#endif

SEC("tp_btf/sched_process_exec")
int BPF_PROG(life_exec, struct task_struct *task, pid_t old_tid)
{
	return fp_exec_done(task, old_tid);
}

SEC("tp_btf/sched_process_fork")
int BPF_PROG(life_fork, struct task_struct *parent, struct task_struct *child)
{
	return fp_fork_done(parent, child);
}

SEC("tp_btf/sched_process_exit")
int BPF_PROG(life_exit, struct task_struct *task)
{
	return fp_exit_done(task);
}
