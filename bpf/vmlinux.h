/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The few kernel types the programs read, written by hand: only the fields used, found at load time by CO-RE relocation, so neither
 * their order nor the fields left out matter. Enumerations and map types come from the uapi headers.
 */
#ifndef FRAGPROF_VMLINUX_H
#define FRAGPROF_VMLINUX_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#include "machine.bpf.h"

typedef int pid_t;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

/* mm/uprobes: the page of return trampolines and out-of-line slots, [uprobes] in /proc/PID/maps. */
struct xol_area {
	unsigned long vaddr;
};

struct uprobes_state {
	struct xol_area *xol_area;
};

struct mm_struct {
	struct uprobes_state uprobes_state;
};

/* include/linux/uprobes.h: one pending return probe of a thread. stack = address of the swapped return address. */
struct return_instance {
	unsigned long stack;
	unsigned long orig_ret_vaddr;
	struct return_instance *next;
};

struct uprobe_task {
	struct return_instance *return_instances;
};

struct signal_struct {
	int group_exit_code;
	struct {
		int counter;
	} live;
};

#if defined(__TARGET_ARCH_x86)
struct thread_struct {
	unsigned long fsbase;
};
#elif defined(__TARGET_ARCH_arm64)
struct thread_struct {
	struct {
		unsigned long tp_value;
	} uw;
};
#endif

struct task_struct {
	struct thread_struct thread;
	unsigned int flags;
	unsigned int ptrace;
	struct {
		unsigned long sig[1];
	} blocked;
	pid_t pid;
	pid_t tgid;
	struct task_struct *group_leader;
	char comm[16];
	int exit_code;
	unsigned long sas_ss_sp;
	unsigned long sas_ss_size;
	unsigned long nvcsw;
	unsigned long nivcsw;
	struct mm_struct *mm;
	struct signal_struct *signal;
	struct uprobe_task *utask;
};

#pragma clang attribute pop

#endif
