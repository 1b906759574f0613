// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * Empty programs: the floor with which `fragprof bench` compares exact mode. They cost only the trap, which no tool that uses uprobes can
 * avoid.
 */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Entry and return. */
SEC("uprobe.session")
int floor_session(void *ctx)
{
	return 0;
}

/* Entry only. */
SEC("uprobe.multi")
int floor_entry(void *ctx)
{
	return 0;
}
