// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/* A consumer of otel_memory that shares no code with the emitter: libbpf finds the notes, decodes the locations of the arguments, and
 * maintains the semaphores. Every hit becomes one record, with its stack if the process's unwind tables are loaded. */
/* The registers have the kernel's names in bpf/vmlinux.h. */
#define __VMLINUX_H__
#include "../../bpf/unwind.bpf.h"
#include <bpf/usdt.bpf.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define TEST_FRAMES_MAX 24

struct record {
	__u32 pid;
	__u32 is_free;
	__u64 pointer;
	__u64 size_bytes;
	__u64 weight_bytes;
	__u64 interval_bytes;
	__u32 len;
	__u32 end;
	__u64 frames[TEST_FRAMES_MAX];
};

/* About 140,000 records: more than any test causes between two reads. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 32 << 20);
} records SEC(".maps");

/* State of the walk of a thread's stack. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_walk);
} walks SEC(".maps");

/* Records that found the ring full. */
__u64 lost = 0;

SEC("usdt")
int on_alloc(struct pt_regs *regs)
{
	struct record *record = bpf_ringbuf_reserve(&records, sizeof *record, 0);
	struct fp_walk *walk;
	long pointer = 0, size = 0, weight = 0, interval = 0;
	__u32 i;

	fp_stay_on_the_threads_stack(regs);
	if (!record) {
		__sync_fetch_and_add(&lost, 1);
		return 0;
	}
	bpf_usdt_arg(regs, 0, &pointer);
	bpf_usdt_arg(regs, 1, &size);
	bpf_usdt_arg(regs, 2, &weight);
	bpf_usdt_arg(regs, 3, &interval);
	record->pid = bpf_get_current_pid_tgid() >> 32;
	record->is_free = 0;
	record->pointer = pointer;
	record->size_bytes = size;
	record->weight_bytes = weight;
	record->interval_bytes = interval;
	record->len = 0;
	record->end = 0;
	walk = bpf_task_storage_get(&walks, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (walk) {
		unwind_into(walk, regs, record->pid, regs->sp);
		record->len = walk->len;
		record->end = walk->end;
		for (i = 0; i < TEST_FRAMES_MAX; i++)
			record->frames[i] = *fp_word_at(walk, walk->now, i);
	}
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	return 0;
}

SEC("usdt")
int on_free(struct pt_regs *regs)
{
	struct record *record = bpf_ringbuf_reserve(&records, sizeof *record, 0);
	long pointer = 0;

	if (!record) {
		__sync_fetch_and_add(&lost, 1);
		return 0;
	}
	bpf_usdt_arg(regs, 0, &pointer);
	record->pid = bpf_get_current_pid_tgid() >> 32;
	record->is_free = 1;
	record->pointer = pointer;
	record->size_bytes = 0;
	record->weight_bytes = 0;
	record->interval_bytes = 0;
	record->len = 0;
	record->end = 0;
	bpf_ringbuf_submit(record, BPF_RB_NO_WAKEUP);
	return 0;
}
