/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Changes of a watched process's address space -> records.
 *
 * One program on the raw tracepoint at the end of every system call, where arguments (still in the saved registers) and result are both
 * at hand: no state between two tracepoints, no tracefs. It runs for every process; the system call's number sends nearly all away, a
 * hash lookup the unwatched. docs/design/0002 has the price and what was tried instead.
 *
 * Only calls that succeeded are sent. A call made by the allocator itself carries the stack of the allocation it serves.
 */
#ifndef FRAGPROF_VM_BPF_H
#define FRAGPROF_VM_BPF_H

#include "maps.bpf.h"
#include "thread.bpf.h"

/* System calls return -errno in the last page of the address space. */
static __always_inline bool fp_failed(long result)
{
	return (unsigned long)result >= (unsigned long)-4095L;
}

/* The allocator call the thread is in, NULL if it is in none. */
static __always_inline struct fp_call *fp_open_call(void)
{
	struct fp_thread *thread = bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, 0);
	__u32 top;

	if (!thread)
		return NULL;
	top = thread->depth - 1;
	return top < FP_CALLS_MAX ? &thread->calls[top] : NULL;
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
	struct fp_call *call;
	struct fp_vm *record;
	__u32 slot;

	target = fp_target_of_current(&slot);
	if (!target || !(target->flags & FP_TARGET_VM))
		return 0;
	record = FP_RESERVE(struct fp_vm, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_VM, 0, FP_CNT_LOST_VM);
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
	call = fp_open_call();
	record->stack = call ? call->stack : 0;
	record->request = call ? call->size : 0;
	fp_submit(record);
	return 0;
}

/* x86-64 system call numbers (arch/x86/entry/syscalls/syscall_64.tbl). */
enum fp_syscall {
	FP_SYS_MMAP = 9,
	FP_SYS_MPROTECT = 10,
	FP_SYS_MUNMAP = 11,
	FP_SYS_BRK = 12,
	FP_SYS_MREMAP = 25,
	FP_SYS_MADVISE = 28,
};

/* regs: as saved at the call: orig_ax is its number, di, si, dx, r10, r8 its arguments. */
static __always_inline int fp_syscall_done(struct pt_regs *regs, long result)
{
	struct fp_vm_args vm = { .addr = regs->di, .len = regs->si };
	__u32 op;

	switch (regs->orig_ax) {
	case FP_SYS_MMAP:
		op = FP_VM_MMAP;
		vm.addr = result;
		vm.prot = regs->dx;
		vm.flags = regs->r10;
		vm.fd = regs->r8;
		break;
	case FP_SYS_MUNMAP:
		op = FP_VM_MUNMAP;
		break;
	case FP_SYS_BRK:
		/* Returns the break as it now is, and never fails otherwise; brk(0), with which every C library begins, tells where
		 * growth starts from. */
		op = FP_VM_BRK;
		vm.addr = result;
		vm.len = 0;
		break;
	case FP_SYS_MREMAP:
		op = FP_VM_MREMAP;
		vm.addr2 = result;
		vm.len2 = regs->dx;
		break;
	case FP_SYS_MADVISE:
		op = FP_VM_MADVISE;
		vm.flags = regs->dx;
		break;
	case FP_SYS_MPROTECT:
		op = FP_VM_MPROTECT;
		vm.prot = regs->dx;
		break;
	default:
		return 0;
	}
	return fp_failed(result) ? 0 : fp_send_vm(op, &vm);
}

#endif
