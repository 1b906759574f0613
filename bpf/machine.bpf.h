/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Properties of the instruction set: registers, the location of return addresses, signal frames, system call numbers. One header per
 * architecture, with the same names in it; src/machine/ is the daemon's side. __TARGET_ARCH_* is libbpf's name for the target.
 *
 * An unwind rule names a register in 4 bits (src/machine/ has the codes). Two codes are the same everywhere (enum fp_rule_register).
 */
#ifndef FRAGPROF_MACHINE_BPF_H
#define FRAGPROF_MACHINE_BPF_H

#include "unwind_table.h"

#ifdef FP_HOST
#define FP_KERNEL_STRUCT
#else
#include <bpf/bpf_helpers.h>
#define FP_KERNEL_STRUCT __attribute__((preserve_access_index))
#endif

/* Loads the word at an offset of the probe's registers by a separate instruction: otherwise the compiler folds the cases of a switch into
 * one load at a computed offset of the context, which the verifier refuses. The offsets are uapi, and fixed. */
#define FP_LOAD_AT(regs, at)                                        \
	({                                                          \
		__u64 value_;                                       \
		asm volatile("%0 = *(u64 *)(%1 + %2)"               \
			     : "=r"(value_)                         \
			     : "r"(regs), "i"(at));                 \
		value_;                                             \
	})

#if defined(__TARGET_ARCH_x86)
#include "machine_x86.bpf.h"
#elif defined(__TARGET_ARCH_arm64)
#include "machine_arm64.bpf.h"
#else
#error "fragprof supports x86-64 and arm64"
#endif

/* A thread's user registers, as registers.bpf.c reports them. */
struct fp_thread_registers {
	unsigned long long tid;
	unsigned long long words[FP_REGISTER_WORDS];
};
#endif
