/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * arm64. A call leaves its return address in x30, and nothing on the stack; functions that call others save it, nearly always next to
 * x29. Codes of registers in rules: 0 to 4 and 8 to 15 are x0 to x4 and x8 to x15, 5 is x30, 6 is x29, 7 is sp; others have none.
 *
 * Return addresses may be signed (pointer authentication): the signature is in the bits above the address, and is cut off.
 */
#ifndef FRAGPROF_MACHINE_ARM64_BPF_H
#define FRAGPROF_MACHINE_ARM64_BPF_H

/* First address that does not count as user code: 48 bits. Programs that request it may have data above (52 bits); the kernel puts its
 * return trampoline there, without a request, and it is recognised by the lower bits. */
#define FP_USER_END (1ULL << 48)

/* Words of `struct pt_regs` that are read of a thread: x0 to x30, sp, pc. */
#define FP_REGISTER_WORDS 33

/* arch/arm64/include/asm/ptrace.h; begins with the uapi's struct user_pt_regs. */
struct pt_regs {
	unsigned long long regs[31];
	unsigned long long sp;
	unsigned long long pc;
	unsigned long long pstate;
	unsigned long long orig_x0;
	int syscallno;
} FP_KERNEL_STRUCT;

#define FP_REG_LINK 5

/* Whether calls leave the return address in this register. */
static __always_inline bool fp_is_link(__u32 reg)
{
	return reg == FP_REG_LINK;
}

#define FP_PC(regs_) ((regs_)->pc)
#define FP_SP(regs_) ((regs_)->sp)
#define FP_BP(regs_) ((regs_)->regs[29])
#define FP_RESULT(regs_) ((regs_)->regs[0])

/* A system call's number and arguments: x0 already holds its result at that point. */
#define FP_SYSCALL(regs_) ((regs_)->syscallno)
#define FP_SYSCALL_0(regs_) ((regs_)->orig_x0)
#define FP_SYSCALL_1(regs_) ((regs_)->regs[1])
#define FP_SYSCALL_2(regs_) ((regs_)->regs[2])
#define FP_SYSCALL_3(regs_) ((regs_)->regs[3])
#define FP_SYSCALL_4(regs_) ((regs_)->regs[4])

/* A kernel function's parameters at its entry, the first being 0. */
#define FP_PARAMETER_1(regs_) ((regs_)->regs[1])
#define FP_PARAMETER_2(regs_) ((regs_)->regs[2])

/* include/uapi/asm-generic/unistd.h */
enum fp_syscall {
	FP_SYS_BRK = 214,
	FP_SYS_MUNMAP = 215,
	FP_SYS_MREMAP = 216,
	FP_SYS_MMAP = 222,
	FP_SYS_MPROTECT = 226,
	FP_SYS_MADVISE = 233,
};

#define FP_RETURN_POPS 0
/* A frame record may lie anywhere in its frame (AAPCS64, 6.4.6), so it gives the caller's x29 and pc, but not its stack pointer. */
#define FP_FRAME_POINTER_TELLS_SP 0

static __always_inline __u64 fp_return_slot(const struct fp_rule *rule, __u64 cfa, __u64 bp_address)
{
	switch (rule->saved >> 4) {
	case FP_RA_BESIDE_BP: return bp_address + 8;
	case FP_RA_AT_REG: return cfa - (__s64)rule->offset + 8 * (__s64)rule->bp_slot;
	default: return cfa + 8 * (__s64)rule->bp_slot;
	}
}

static __always_inline __u64 fp_repeated_return_slot(__u64 caller_sp, __s32 bp_at)
{
	return caller_sp + (__s64)bp_at + 8;
}

/* Of a step only the location of the caller's x29 is kept. */
static __always_inline bool fp_return_is_repeatable(const struct fp_rule *rule)
{
	return rule->saved >> 4 == FP_RA_BESIDE_BP;
}

/* The bits of an address of user code: as many as the kernel's user space has, at most 48. Set before the programs are loaded. */
#ifdef FP_HOST
static __u64 fp_code_mask = (1ULL << 48) - 1;
#else
const volatile __u64 fp_code_mask SEC(".rodata.code") = (1ULL << 48) - 1;
#endif

static __always_inline __u64 fp_code_address(__u64 word)
{
	return word & fp_code_mask;
}

/* struct rt_sigframe (arch/arm64/kernel/signal.c): 128 bytes of siginfo, then the ucontext, in which the sigcontext is aligned to 16. */
#define FP_SIGNAL_SIGCONTEXT 304
#define FP_SIGCONTEXT_PC 264

/* struct sigcontext (arch/arm64/include/uapi/asm/sigcontext.h): the fault's address, x0 to x30, sp, pc. By code. */
static __always_inline __u32 fp_sigcontext_offset(__u32 reg)
{
	switch (reg) {
	case FP_REG_LINK: return 8 + 8 * 30;
	case FP_REG_BP: return 8 + 8 * 29;
	case FP_REG_SP: return 8 + 8 * 31;
	default: return 8 + 8 * reg;
	}
}

/* mov x8, #139; svc #0: the vdso's, and the C libraries' where there is none. */
#define FP_SIGNAL_RETURN_BYTES 8
static __always_inline bool fp_is_signal_return_code(const __u64 *code)
{
	return code[0] == 0xd4000001d2801168ULL;
}

/* The thread pointer, as the kernel saved it when it last took the thread off a CPU: until then the main thread has none. A thread's
 * descriptor, which pthread_self returns, lies below it by its size (TLS variant I): 1,792 to 1,856 bytes in Debian's glibc 2.31 to 2.43,
 * 200 in musl 1.2.3. Those of two threads are further apart, because each is at the end of the thread's own stack. */
#define FP_THREAD_POINTER(task) ((task)->thread.uw.tp_value)
#define FP_THREAD_DESCRIPTOR_MAX 4096

static __always_inline bool fp_is_thread_self(__u64 word, __u64 pointer)
{
	return pointer - word - 1 < FP_THREAD_DESCRIPTOR_MAX;
}

/* Where HotSpot's interpreter has the bytecode's address while it executes (rbcp): x22, kept in the place of sp, which rules have from the
 * walk. */
#define FP_INTERPRETER_REGISTER FP_REG_SP
/* An interpreted method keeps its stack pointer below the most that it will push, and one that it calls begins where it has really pushed
 * to: that one's frame may lie above the caller's stack pointer. */
#define FP_INTERPRETED_OVERLAPS 1

static __always_inline void fp_keep_registers(__u64 *leaf, struct pt_regs *regs)
{
	leaf[FP_INTERPRETER_REGISTER] = regs->regs[22];
	leaf[0] = regs->regs[0];
	leaf[1] = regs->regs[1];
	leaf[2] = regs->regs[2];
	leaf[3] = regs->regs[3];
	leaf[4] = regs->regs[4];
	leaf[FP_REG_LINK] = regs->regs[30];
	leaf[8] = regs->regs[8];
	leaf[9] = regs->regs[9];
	leaf[10] = regs->regs[10];
	leaf[11] = regs->regs[11];
	leaf[12] = regs->regs[12];
	leaf[13] = regs->regs[13];
	leaf[14] = regs->regs[14];
	leaf[15] = regs->regs[15];
}

#ifndef FP_HOST
/* DWARF register number -> value at the probe: x0 to x30 and sp have these numbers, and lie in this order. */
static __always_inline __u64 fp_register(struct pt_regs *regs, __u32 number)
{
#define FP_X(n) case n: return FP_LOAD_AT(regs, 8 * (n))
	switch (number) {
	FP_X(0); FP_X(1); FP_X(2); FP_X(3); FP_X(4); FP_X(5); FP_X(6); FP_X(7);
	FP_X(8); FP_X(9); FP_X(10); FP_X(11); FP_X(12); FP_X(13); FP_X(14); FP_X(15);
	FP_X(16); FP_X(17); FP_X(18); FP_X(19); FP_X(20); FP_X(21); FP_X(22); FP_X(23);
	FP_X(24); FP_X(25); FP_X(26); FP_X(27); FP_X(28); FP_X(29); FP_X(30); FP_X(31);
	default: return 0;
	}
#undef FP_X
}

/* Whether an open call has not returned yet. Where its frame has saved x30 is not known here, so a deeper stack pointer counts as proof,
 * as in the kernel (arch_uretprobe_is_alive); at the same one, an entry whose x30 is the trampoline is a tail call. */
static __always_inline bool fp_return_is_probed(struct pt_regs *regs, __u64 sp, __u64 call_sp, __u64 trampoline)
{
	return sp != call_sp || regs->regs[30] == trampoline;
}
#endif
#endif
