/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Changes of a watched process's address space -> records.
 *
 * One program on the raw tracepoint at the end of every system call, where arguments (still in the saved registers) and result are both
 * at hand: no state between two tracepoints, no tracefs. It runs for every process; the system call's number sends nearly all away, a
 * hash lookup the unwatched. docs/design/0002 has the price and what was tried instead.
 *
 * Only calls that succeeded are sent. A call made by the allocator itself carries the stack of the allocation it serves. While a
 * governed target's probes are out nobody knows that allocation, so the stack is taken at the system call itself: such calls are rare.
 *
 * First touches of pages are sampled, each with the same chance: a tracepoint that every fault of the machine passes, so what is not
 * wanted must leave soon.
 */
#ifndef FRAGPROF_VM_BPF_H
#define FRAGPROF_VM_BPF_H

#include "hold.bpf.h"
#include "maps.bpf.h"
#include "stack.bpf.h"
#include "thread.bpf.h"

/* System calls return -errno in the last page of the address space. */
static __always_inline bool fp_failed(long result)
{
	return (unsigned long)result >= (unsigned long)-4095L;
}

/* The allocator call the thread is in, NULL if it is in none. */
static __always_inline struct fp_call *fp_open_call(void)
{
	struct fp_thread *thread = fp_thread_find();
	__u32 top;

	if (!thread)
		return NULL;
	top = thread->calls.depth - 1;
	return top < FP_CALLS_MAX ? &thread->calls.open[top] : NULL;
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

/* MAP_ANONYMOUS and PROT_WRITE, which uapi headers for C define in different places. */
#define FP_MAP_ANONYMOUS 0x20
#define FP_PROT_WRITE 0x2
#define FP_PROT_EXEC 0x4

/* The stack from which user space entered the kernel. */
static __always_inline __u64 fp_stack_of_entry(struct pt_regs *regs, struct fp_target *target, __u32 slot)
{
	struct fp_thread *thread = fp_thread_of_current();

	if (!thread)
		return 0;
	unwind_into(&thread->walk, regs, (__u32)target->mm_id, 0);
	return fp_publish_stack(&thread->walk, target, slot);
}

/* Whether a change may be an allocator's growth. */
static __always_inline bool fp_may_grow(__u32 op, const struct fp_vm_args *args)
{
	return op == FP_VM_BRK || op == FP_VM_MREMAP || (op == FP_VM_MMAP && args->flags & FP_MAP_ANONYMOUS) ||
	       (op == FP_VM_MPROTECT && args->prot & FP_PROT_WRITE);
}

static __always_inline int fp_send_vm(struct pt_regs *regs, __u32 op, const struct fp_vm_args *args)
{
	struct fp_target *target;
	struct fp_call *call;
	struct fp_vm *record;
	__u64 stack, request;
	bool holds = false;
	__u32 slot;

	target = fp_target_of_current(&slot);
	if (!target || !(target->flags & FP_TARGET_VM))
		return 0;
	if (target->flags & FP_TARGET_HELD && op == FP_VM_MMAP && args->fd >= 0 && args->prot & FP_PROT_EXEC)
		holds = fp_hold();
	call = fp_open_call();
	stack = call ? call->stack : 0;
	request = call ? call->size : 0;
	/* A call whose probes were taken out before it returned looks open for ever: a governed target's stack is always taken here. */
	if (target->flags & FP_TARGET_GROWTH) {
		request = 0;
		stack = fp_may_grow(op, args) ? fp_stack_of_entry(regs, target, slot) : 0;
	}
	record = FP_RESERVE(struct fp_vm, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_VM, holds, FP_CNT_LOST_VM);
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
	record->stack = stack;
	record->request = request;
	fp_submit(record);
	return 0;
}

/* A page fault of user space. error: bit 0 = the page was there (a protection fault). */
static __always_inline int fp_page_fault(unsigned long addr, struct pt_regs *regs, unsigned long error)
{
	struct fp_target *target;
	struct fp_vm *record;
	__u64 interval, stack;
	__u32 slot;

	if (error & 1)
		return 0;
	target = fp_target_of_current(&slot);
	if (!target)
		return 0;
	interval = target->touch_interval;
	if (!interval || (interval > 1 && bpf_get_prandom_u32() % interval))
		return 0;
	stack = fp_stack_of_entry(regs, target, slot);
	record = FP_RESERVE(struct fp_vm, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_VM, 0, FP_CNT_LOST_VM);
	if (!record)
		return 0;
	record->addr = addr;
	record->len = 0;
	record->addr2 = 0;
	record->len2 = interval;
	record->op = FP_VM_TOUCH;
	record->prot = 0;
	record->flags = 0;
	record->fd = -1;
	record->stack = stack;
	record->request = 0;
	fp_submit(record);
	return 0;
}

/* regs: as saved at the call. */
static __always_inline int fp_syscall_done(struct pt_regs *regs, long result)
{
	struct fp_vm_args vm = { .addr = FP_SYSCALL_0(regs), .len = FP_SYSCALL_1(regs) };
	__u32 op;

	switch (FP_SYSCALL(regs)) {
	case FP_SYS_MMAP:
		op = FP_VM_MMAP;
		vm.addr = result;
		vm.prot = FP_SYSCALL_2(regs);
		vm.flags = FP_SYSCALL_3(regs);
		vm.fd = FP_SYSCALL_4(regs);
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
		vm.len2 = FP_SYSCALL_2(regs);
		break;
	case FP_SYS_MADVISE:
		op = FP_VM_MADVISE;
		vm.flags = FP_SYSCALL_2(regs);
		break;
	case FP_SYS_MPROTECT:
		op = FP_VM_MPROTECT;
		vm.prot = FP_SYSCALL_2(regs);
		break;
	default:
		return 0;
	}
	return fp_failed(result) ? 0 : fp_send_vm(regs, op, &vm);
}

#endif
