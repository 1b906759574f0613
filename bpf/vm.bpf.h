/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Changes of a watched process's address space -> records.
 *
 * The programs hang on the exit of the system call's own function (fexit), where arguments and result are both at hand: no state
 * between two tracepoints, and no slow path for every system call of the machine, which syscall tracepoints turn on. They run for
 * every process; a hash lookup sends the unwatched away.
 *
 * Only calls that succeeded are sent. A call made by the allocator itself carries the stack of the allocation it serves.
 */
#ifndef FRAGPROF_VM_BPF_H
#define FRAGPROF_VM_BPF_H

#include "maps.bpf.h"

/* System calls return -errno in the last page of the address space. */
static __always_inline bool fp_failed(long result)
{
	return (unsigned long)result >= (unsigned long)-4095L;
}

/* The stack of the allocator call the thread is in, 0 if it is in none. */
static __always_inline __u64 fp_stack_of_open_call(void)
{
	struct fp_thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, 0);
	__u32 top;

	if (!thread)
		return 0;
	top = thread->depth - 1;
	return top < FP_CALLS_MAX ? thread->calls[top].stack : 0;
}

static __always_inline struct fp_target *fp_target_of_current(__u32 *slot)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32, *found;

	found = bpf_map_lookup_elem(&slot_of_tgid, &tgid);
	if (!found)
		return NULL;
	*slot = *found;
	return fp_target_of(*found);
}

struct fp_vm_args {
	__u64 addr, len, addr2, len2;
	__u32 prot, flags;
	int fd;
};

static __always_inline int fp_send_vm(__u32 op, const struct fp_vm_args *args)
{
	struct fp_target *target;
	struct fp_vm *record;
	__u32 slot;

	target = fp_target_of_current(&slot);
	if (!target || !(target->flags & FP_TARGET_VM))
		return 0;
	record = FP_RESERVE(struct fp_vm, target, slot, FP_REC_VM, 0, FP_CNT_LOST_VM);
	if (!record)
		return 0;
	record->addr = args->addr;
	record->len = args->len;
	record->addr2 = args->addr2;
	record->len2 = args->len2;
	record->op = op;
	record->prot = args->prot;
	record->flags = args->flags;
	record->fd = args->fd;
	record->stack = fp_stack_of_open_call();
	fp_submit(record);
	fp_count(FP_CNT_VM);
	return 0;
}

static __always_inline int fp_mmap_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = {
		.addr = result,
		.len = args->si,
		.prot = args->dx,
		.flags = args->r10,
		.fd = args->r8,
	};

	return fp_failed(result) ? 0 : fp_send_vm(FP_VM_MMAP, &vm);
}

static __always_inline int fp_munmap_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = { .addr = args->di, .len = args->si };

	return fp_failed(result) ? 0 : fp_send_vm(FP_VM_MUNMAP, &vm);
}

static __always_inline int fp_mremap_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = { .addr = args->di, .len = args->si, .addr2 = result, .len2 = args->dx, .flags = args->r10 };

	return fp_failed(result) ? 0 : fp_send_vm(FP_VM_MREMAP, &vm);
}

/* brk returns the break as it now is, and never fails otherwise; brk(0) only asks. */
static __always_inline int fp_brk_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = { .addr = result };

	return args->di ? fp_send_vm(FP_VM_BRK, &vm) : 0;
}

static __always_inline int fp_madvise_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = { .addr = args->di, .len = args->si, .flags = args->dx };

	return fp_failed(result) ? 0 : fp_send_vm(FP_VM_MADVISE, &vm);
}

static __always_inline int fp_mprotect_done(struct pt_regs *args, long result)
{
	struct fp_vm_args vm = { .addr = args->di, .len = args->si, .prot = args->dx };

	return fp_failed(result) ? 0 : fp_send_vm(FP_VM_MPROTECT, &vm);
}

#endif
