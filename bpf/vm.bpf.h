/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Changes of a watched process's address space -> records.
 *
 * One program on the raw tracepoint at the end of every system call, where arguments (still in the saved registers) and result are both
 * available: no state between two tracepoints, no tracefs. It runs for every process; a check of the system call's number rejects nearly
 * all calls, a hash lookup the unwatched processes. docs/design/0002 has the price and the alternatives.
 *
 * Only calls that succeeded are sent. A call made by the allocator itself carries the stack of the allocation it serves. While a
 * governed target's probes are detached that allocation is unknown, so the stack is taken at the system call itself: such calls are rare.
 *
 * First touches of pages are sampled, each with the same probability: every page fault of the machine hits the tracepoint, so unwanted
 * ones must be rejected early.
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

/* The cause of a change of the address space. */
struct fp_reason {
	__u64 stack;        /* of the thread's open allocator call: hash, 0 = none */
	__u64 request;      /* bytes that the call requests */
	__u32 slot;         /* of the target whose probes saw the call: the stack is defined for that one alone */
	__u64 growth_stack; /* for the target that wants the stack of each growth */
};

/* The thread's open allocator call. */
static __always_inline void fp_find_open_call(struct fp_reason *reason)
{
	struct fp_thread *thread = fp_thread_find();
	struct fp_call *call;
	__u32 top;

	if (!thread)
		return;
	top = thread->calls.depth - 1;
	if (top >= FP_CALLS_MAX)
		return;
	call = &thread->calls.open[top & (FP_CALLS_MAX - 1)];
	reason->stack = call->stack;
	reason->request = call->size;
	reason->slot = thread->calls.slot;
}

/* Kernels without attach cookies have one recording of a process at a time (src/capture/processes.rs), and a verifier that has to check
 * each iteration of a loop. */
#ifdef FP_LEGACY
#define FP_SLOTS_LOOKED_AT 1
#else
#define FP_SLOTS_LOOKED_AT FP_SLOTS_OF_PROCESS
#endif

/* The targets of the current process; NULL if it is not watched. */
static __always_inline struct fp_slots *fp_slots_of_current(void)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;

	return bpf_map_lookup_elem(&slots_of_tgid, &tgid);
}

/* The first of them that has one of the flags; its slot. */
static __always_inline struct fp_target *fp_target_with(const struct fp_slots *slots, __u32 flags, __u32 *slot)
{
	struct fp_target *target;
	int i;

	for (i = 0; i < FP_SLOTS_LOOKED_AT; i++) {
		*slot = slots->slot[i];
		target = fp_target_of(*slot);
		if (target && target->flags & flags)
			return target;
	}
	return NULL;
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
	struct fp_thread *thread = fp_thread_of_current(target);

	if (!thread)
		return 0;
	fp_walk_stack(&thread->walk, regs, target, 0);
	return fp_publish_stack(&thread->walk, target, slot);
}

/* Whether a change may be an allocator's growth. */
static __always_inline bool fp_may_grow(__u32 op, const struct fp_vm_args *args)
{
	return op == FP_VM_BRK || op == FP_VM_MREMAP || (op == FP_VM_MMAP && args->flags & FP_MAP_ANONYMOUS) ||
	       (op == FP_VM_MPROTECT && args->prot & FP_PROT_WRITE);
}

/* Sends a change to one target. */
static __always_inline void fp_send_vm_to(struct fp_target *target, __u32 slot, __u32 op, const struct fp_vm_args *args,
					  const struct fp_reason *reason, bool holds)
{
	__u64 stack = reason->slot == slot ? reason->stack : 0, request = reason->slot == slot ? reason->request : 0;
	struct fp_vm *record;

	/* A call whose probes were detached before it returned looks open for ever: a governed target's stack is always taken here. */
	if (target->flags & FP_TARGET_GROWTH) {
		stack = reason->growth_stack;
		request = 0;
	}
	record = FP_RESERVE(struct fp_vm, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_VM, holds, FP_CNT_LOST_VM);
	if (!record)
		return;
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
}

static __always_inline int fp_send_vm(struct pt_regs *regs, __u32 op, const struct fp_vm_args *args)
{
	struct fp_slots *slots = fp_slots_of_current();
	struct fp_reason reason = {};
	struct fp_target *target;
	bool holds;
	__u32 slot;
	int i;

	if (!slots)
		return 0;
	holds = op == FP_VM_MMAP && args->fd >= 0 && args->prot & FP_PROT_EXEC && fp_target_with(slots, FP_TARGET_HELD, &slot) && fp_hold();
	fp_find_open_call(&reason);
	target = fp_may_grow(op, args) ? fp_target_with(slots, FP_TARGET_GROWTH, &slot) : NULL;
	if (target)
		reason.growth_stack = fp_stack_of_entry(regs, target, slot);
	for (i = 0; i < FP_SLOTS_LOOKED_AT; i++) {
		slot = slots->slot[i];
		target = fp_target_of(slot);
		if (target && target->flags & FP_TARGET_VM)
			fp_send_vm_to(target, slot, op, args, &reason, holds && target->flags & FP_TARGET_HELD);
	}
	return 0;
}

/* FAULT_FLAG_USER of linux/mm_types.h. */
#define FP_FAULT_OF_USER 0x40

/* A page fault of user space, for a page that was not present. regs: as saved at the fault. */
static __always_inline int fp_page_fault(unsigned long addr, struct pt_regs *regs)
{
	struct fp_slots *slots;
	struct fp_target *target;
	struct fp_vm *record;
	__u64 interval, stack;
	__u32 slot;

	slots = fp_slots_of_current();
	target = slots ? fp_target_with(slots, FP_TARGET_GROWTH, &slot) : NULL;
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
		/* Returns the present break, and never fails otherwise; brk(0), with which every C library begins, shows where
		 * growth starts from. */
		op = FP_VM_BRK;
		vm.addr = result;
		vm.len = 0;
		break;
	case FP_SYS_MREMAP:
		op = FP_VM_MREMAP;
		vm.addr2 = result;
		vm.len2 = FP_SYSCALL_2(regs);
		vm.flags = FP_SYSCALL_3(regs);
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
