/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/* x86-64. A call pushes its return address; a return pops it. Codes of registers are their DWARF numbers. */
#ifndef FRAGPROF_MACHINE_X86_BPF_H
#define FRAGPROF_MACHINE_X86_BPF_H

/* First address that is not user code: 47 bits, of which the last page is never mapped. */
#define FP_USER_END ((1ULL << 47) - 4096)

/* Words of `struct pt_regs` that are read of a thread: r15 to ss. */
#define FP_REGISTER_WORDS 21

/* arch/x86/include/asm/ptrace.h: the kernel's own struct, field names without the uapi's r prefix. */
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax, ip, cs, flags, sp, ss;
} FP_KERNEL_STRUCT;

#define FP_PC(regs) ((regs)->ip)
#define FP_SP(regs) ((regs)->sp)
#define FP_BP(regs) ((regs)->bp)
#define FP_RESULT(regs) ((regs)->ax)

/* A system call's number and arguments, as saved at its entry. */
#define FP_SYSCALL(regs) ((regs)->orig_ax)
#define FP_SYSCALL_0(regs) ((regs)->di)
#define FP_SYSCALL_1(regs) ((regs)->si)
#define FP_SYSCALL_2(regs) ((regs)->dx)
#define FP_SYSCALL_3(regs) ((regs)->r10)
#define FP_SYSCALL_4(regs) ((regs)->r8)

/* arch/x86/entry/syscalls/syscall_64.tbl */
enum fp_syscall {
	FP_SYS_MMAP = 9,
	FP_SYS_MPROTECT = 10,
	FP_SYS_MUNMAP = 11,
	FP_SYS_BRK = 12,
	FP_SYS_MREMAP = 25,
	FP_SYS_MADVISE = 28,
};

/* Page faults have a tracepoint (arch/x86/include/asm/trace/exceptions.h). */
#define FP_PAGE_FAULT_TRACEPOINT 1

/* Bytes that a return pops: at a function's entry the caller's stack pointer is higher by this much. */
#define FP_RETURN_POPS 8
/* A frame pointer's own address gives the caller's stack pointer: the return address is pushed just before the frame pointer. */
#define FP_FRAME_POINTER_TELLS_SP 1

/* Where a row's return address is. */
static __always_inline __u64 fp_return_slot(const struct fp_rule *rule, __u64 cfa, __u64 bp_address)
{
	return cfa - 8;
}

/* The same for a step that may be repeated, from what is kept of it. */
static __always_inline __u64 fp_repeated_return_slot(__u64 caller_sp, __s32 bp_at)
{
	return caller_sp - 8;
}

/* Whether calls leave the return address in this register. */
static __always_inline bool fp_is_link(__u32 reg)
{
	return false;
}

static __always_inline bool fp_return_is_repeatable(const struct fp_rule *rule)
{
	return true;
}

/* The address in a return address as it is stored. */
static __always_inline __u64 fp_code_address(__u64 word)
{
	return word;
}

/* struct ucontext begins with flags, link and the alternate stack; then the sigcontext. From the stack pointer at the trampoline. */
#define FP_SIGNAL_SIGCONTEXT 40
#define FP_SIGCONTEXT_PC 128

/* struct sigcontext's offset of a register, by code (arch/x86/include/uapi/asm/sigcontext.h). */
static __always_inline __u32 fp_sigcontext_offset(__u32 reg)
{
	switch (reg) {
	case 0: return 104;  /* rax */
	case 1: return 96;   /* rdx */
	case 2: return 112;  /* rcx */
	case 3: return 88;   /* rbx */
	case 4: return 72;   /* rsi */
	case 5: return 64;   /* rdi */
	case 6: return 80;   /* rbp */
	case 7: return 120;  /* rsp */
	default: return 8 * (reg - 8); /* r8 to r15 */
	}
}

/* mov $15, %rax or %eax; syscall: how every libc returns from a signal handler. The kernel's ABI makes it the same everywhere, and
 * musl's has no table. */
#define FP_SIGNAL_RETURN_BYTES 9
static __always_inline bool fp_is_signal_return_code(const __u64 *code)
{
	return (code[0] == 0x0f0000000fc0c748ULL && (code[1] & 0xff) == 0x05) ||
	       (code[0] & 0x00ffffffffffffffULL) == 0x00050f0000000fb8ULL;
}

/* Where HotSpot's interpreter has the bytecode's address while it executes (rbcp): r13. */
#define FP_INTERPRETER_REGISTER 13
/* An interpreted method's frame lies below its caller's stack pointer. */
#define FP_INTERPRETED_OVERLAPS 0

/* Keeps the registers that rules may name in addition to rbp and rsp. */
static __always_inline void fp_keep_registers(__u64 *leaf, struct pt_regs *regs)
{
	leaf[0] = regs->ax;
	leaf[1] = regs->dx;
	leaf[2] = regs->cx;
	leaf[3] = regs->bx;
	leaf[4] = regs->si;
	leaf[5] = regs->di;
	leaf[8] = regs->r8;
	leaf[9] = regs->r9;
	leaf[10] = regs->r10;
	leaf[11] = regs->r11;
	leaf[12] = regs->r12;
	leaf[13] = regs->r13;
	leaf[14] = regs->r14;
	leaf[15] = regs->r15;
}

/* The thread pointer, and whether pthread_self returns this there: glibc and musl have a thread's descriptor where its pointer is. */
#define FP_THREAD_POINTER(task) ((task)->thread.fsbase)

static __always_inline bool fp_is_thread_self(__u64 word, __u64 pointer)
{
	return word == pointer;
}

#ifndef FP_HOST
#define FP_LOAD(regs, field) FP_LOAD_AT(regs, __builtin_offsetof(struct pt_regs, field))

/* DWARF register number -> value at the probe. rdi and rsi first: nearly all arguments are there. */
static __always_inline __u64 fp_register(struct pt_regs *regs, __u32 number)
{
	if (number == 5)
		return FP_LOAD(regs, di);
	if (number == 4)
		return FP_LOAD(regs, si);
	switch (number) {
	case 0: return FP_LOAD(regs, ax);
	case 1: return FP_LOAD(regs, dx);
	case 2: return FP_LOAD(regs, cx);
	case 3: return FP_LOAD(regs, bx);
	case 6: return FP_LOAD(regs, bp);
	case 7: return FP_LOAD(regs, sp);
	case 8: return FP_LOAD(regs, r8);
	case 9: return FP_LOAD(regs, r9);
	case 10: return FP_LOAD(regs, r10);
	case 11: return FP_LOAD(regs, r11);
	case 12: return FP_LOAD(regs, r12);
	case 13: return FP_LOAD(regs, r13);
	case 14: return FP_LOAD(regs, r14);
	case 15: return FP_LOAD(regs, r15);
	default: return 0;
	}
}

/* Whether the frame of an open call, entered at call_sp, is still on the stack: its return address is the trampoline. regs: of the present
 * entry. */
static __always_inline bool fp_return_is_probed(struct pt_regs *regs, __u64 sp, __u64 call_sp, __u64 trampoline)
{
	__u64 word = 0;

	bpf_probe_read_user(&word, sizeof(word), (void *)call_sp);
	return word == trampoline;
}
#endif
#endif
