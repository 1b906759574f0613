// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * Empty programs: the floor that `fragprof bench` compares exact mode with. What they cost is the trap alone, which no tool that uses
 * uprobes can go below.
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

/* Entry alone. */
SEC("uprobe.multi")
int floor_entry(void *ctx)
{
	return 0;
}
