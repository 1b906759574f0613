/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Probes in the program itself (USDT otel_memory:alloc and :free, ddheap likewise) -> records.
 *
 * The program, or a library in it, has decided that this allocation is sampled; here the arguments are fetched from wherever its
 * compiler put them, the stack is walked as for any allocation, and a record is sent. A site's cookie names the row of usdt_sites with
 * the arguments' locations; the daemon fills a row before it attaches the first site that names it and never changes it.
 */
#ifndef FRAGPROF_USDT_BPF_H
#define FRAGPROF_USDT_BPF_H

#include "alloc.bpf.h"
#include "maps.bpf.h"
#include "thread.bpf.h"

/* The locations of sites' arguments, by the number in the cookie. Rows are shared by all sites with the same arguments. 1024 x 64 B. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FP_USDT_SITES_MAX);
	__type(key, __u32);
	__type(value, struct fp_usdt_site);
} usdt_sites SEC(".maps");

/* Reads 1, 2, 4 or 8 bytes. Each length has its own call, so that the verifier sees a constant. */
static __always_inline long fp_read_user(__u64 *value, __u32 bytes, void *address)
{
	switch (bytes) {
	case 8: return bpf_probe_read_user(value, 8, address);
	case 4: return bpf_probe_read_user(value, 4, address);
	case 2: return bpf_probe_read_user(value, 2, address);
	case 1: return bpf_probe_read_user(value, 1, address);
	default: return -1;
	}
}

/* An argument's value, extended to 64 bits. Not inlined: a site has four, each of which may be in any register. */
static __noinline __u64 fp_usdt_argument(struct pt_regs *regs, struct fp_usdt_argument *argument, struct fp_target *target)
{
	__u32 bits, bytes;
	__u64 value = 0, address;

	if (!argument || !target)
		return 0;
	bytes = argument->bytes;
	switch (argument->kind) {
	case FP_USDT_CONSTANT:
		return argument->value;
	case FP_USDT_REGISTER:
		value = fp_register(regs, argument->base) >> (argument->shift & 63);
		break;
	case FP_USDT_MEMORY:
		address = argument->value;
		if (argument->base != FP_USDT_NO_REG)
			address += fp_register(regs, argument->base);
		if (argument->index != FP_USDT_NO_REG)
			address += fp_register(regs, argument->index) << (argument->shift & 3);
		if (fp_read_user(&value, bytes, (void *)address)) {
			fp_count(target, FP_CNT_ARGUMENT_UNREADABLE);
			return 0;
		}
		break;
	default:
		return 0;
	}
	if (bytes >= sizeof(value))
		return value;
	bits = (64 - 8 * bytes) & 63;
	value <<= bits;
	return argument->is_signed ? (__u64)((long long)value >> bits) : value >> bits;
}

static __always_inline struct fp_usdt_site *fp_usdt_site_of(__u64 cookie)
{
	__u32 number = FP_USDT_COOKIE_SITE(cookie);

	return bpf_map_lookup_elem(&usdt_sites, &number);
}

static __always_inline void fp_sample(struct pt_regs *regs, __u64 cookie)
{
	struct fp_target *target = fp_target_on(cookie);
	struct fp_usdt_site *site = fp_usdt_site_of(cookie);
	struct fp_thread *thread;
	struct fp_sample *record;
	__u64 addr, size, weight, interval, stack = 0;

	if (!target || !site)
		return;
	addr = fp_usdt_argument(regs, &site->arguments[0], target);
	size = fp_usdt_argument(regs, &site->arguments[1], target);
	weight = fp_usdt_argument(regs, &site->arguments[2], target);
	interval = fp_usdt_argument(regs, &site->arguments[3], target); /* 0 for a row with three */
	if (!addr) {
		fp_count(target, FP_CNT_HIT_NULL);
		return;
	}
	thread = fp_thread_of_current(target);
	if (!thread) {
		fp_lost(target, FP_CNT_LOST_ALLOC);
		return;
	}
	if (target->flags & FP_TARGET_STACKS)
		stack = fp_take_stack(regs, target, thread, cookie, fp_entry_sp(regs, cookie));
	record = FP_RESERVE(struct fp_sample, target, FP_COOKIE_SLOT(cookie), thread->tid, FP_REC_SAMPLE, 0, FP_CNT_LOST_ALLOC);
	if (!record)
		return;
	record->addr = addr;
	record->size = size;
	record->weight = weight;
	record->interval = interval;
	record->stack = stack;
	fp_submit(record);
}

static __always_inline void fp_sampled_free(struct pt_regs *regs, __u64 cookie)
{
	struct fp_target *target = fp_target_on(cookie);
	struct fp_usdt_site *site = fp_usdt_site_of(cookie);
	__u64 addr;

	if (!target || !site)
		return;
	addr = fp_usdt_argument(regs, &site->arguments[0], target);
	if (addr)
		fp_send_free(target, cookie, (__u32)bpf_get_current_pid_tgid(), FP_REC_FREE, addr);
	else
		fp_count(target, FP_CNT_HIT_NULL);
}

#endif
