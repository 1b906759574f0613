/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Allocator entry and return -> records.
 *
 * A site's cookie says which call it is and which registers hold its arguments (fragprof.h). The outermost call of a thread is
 * remembered between its entry and its return; calls made from inside it (calloc -> malloc, realloc(NULL) -> malloc, new -> malloc) are
 * covered by it and only counted. Frees are sent at entry, before the block can be allocated again; allocations at return.
 *
 * A call may never return (exception out of operator new, longjmp, cancelled thread). It is recognised when a later entry of the
 * thread lies above it on the stack, or not, but the word at its stack pointer is no longer the return trampoline that the kernel put
 * there: then the frame is gone. An entry at the very same stack pointer with the trampoline still there is a tail call of the open
 * one (tcmalloc's pvalloc jumps to its memalign): a call of its own would have pushed its return address. So a missed return never makes
 * a thread's later calls count as nested. A signal handler on an alternate stack is neither: its calls are open in addition to the
 * interrupted one.
 */
#ifndef FRAGPROF_ALLOC_BPF_H
#define FRAGPROF_ALLOC_BPF_H

#include "hold.bpf.h"
#include "maps.bpf.h"
#include "stack.bpf.h"
#include "thread.bpf.h"
#include "unwind.bpf.h"

/* A task flag (include/linux/sched.h): forked, and has not called exec. */
#define FP_PF_FORKNOEXEC 0x40

/* The bytes that a call requests. An overflowing calloc or reallocarray fails in the allocator, so its product is never recorded. */
static __always_inline __u64 fp_size_of(struct pt_regs *regs, __u64 cookie)
{
	__u64 size = fp_register(regs, FP_COOKIE_SIZE_REG(cookie));

	if (FP_COOKIE_COUNT_REG(cookie) != FP_NO_REG && !FP_COOKIE_COUNT_ALIGNS(cookie))
		size *= fp_register(regs, FP_COOKIE_COUNT_REG(cookie));
	return size;
}

/* Bytes of a string in which its end is looked for, and that are read at once. The verifier of old kernels checks every turn of the loop. */
#ifdef FP_LEGACY
#define FP_STRING_BYTES_MAX (1 << 15)
#else
#define FP_STRING_BYTES_MAX (1 << 18)
#endif
#define FP_STRING_PART 128

/* A string, as far as it was read. */
struct fp_string {
	__u64 at;
	__u64 bytes; /* with its end, once that was found; 0 = it cannot be read */
	bool is_whole;
};

/* Reads the next part. Returns 1 if it was the last one. */
static long fp_string_next(__u32 number, struct fp_string *string)
{
	char part[FP_STRING_PART];
	long got = bpf_probe_read_user_str(part, sizeof(part), (void *)(string->at + string->bytes));

	/* A full part has an end in place of the string's next byte. */
	string->is_whole = got < (long)sizeof(part);
	if (got <= 0)
		string->bytes = 0;
	else
		string->bytes += string->is_whole ? got : (long)sizeof(part) - 1;
	return string->is_whole;
}

/* The bytes of a string with its end; 0 if it has no end within the limit, or cannot be read. Global, so that the verifier checks it once, by
 * itself. */
__noinline __u64 fp_string_bytes(__u64 at)
{
	struct fp_string string = { .at = at };
#ifdef FP_LEGACY
	int i;

	for (i = 0; i < FP_STRING_BYTES_MAX / FP_STRING_PART; i++)
		if (fp_string_next(i, &string))
			break;
#else
	bpf_loop(FP_STRING_BYTES_MAX / FP_STRING_PART, fp_string_next, &string, 0);
#endif
	return string.is_whole ? string.bytes : 0;
}

#define FP_ALLOC_SIZE_MASK ((1ULL << FP_ALLOC_SIZE_BITS) - 1)

/* A size with log2 of the requested alignment, as in struct fp_alloc. A size of more bits is never allocated. */
static __always_inline __u64 fp_with_alignment(struct pt_regs *regs, __u64 cookie, __u64 size)
{
	__u64 low, bits;

	if (!FP_COOKIE_COUNT_ALIGNS(cookie))
		return size;
	low = fp_register(regs, FP_COOKIE_COUNT_REG(cookie));
	low &= -low;
	bits = (low & 0xaaaaaaaaaaaaaaaaULL ? 1 : 0) | (low & 0xccccccccccccccccULL ? 2 : 0) | (low & 0xf0f0f0f0f0f0f0f0ULL ? 4 : 0) |
	       (low & 0xff00ff00ff00ff00ULL ? 8 : 0) | (low & 0xffff0000ffff0000ULL ? 16 : 0) | (low & 0xffffffff00000000ULL ? 32 : 0);
	return (size & FP_ALLOC_SIZE_MASK) | bits << FP_ALLOC_SIZE_BITS;
}

/* Usable bytes of one of glibc's blocks (malloc_usable_size) if it is a large one, whose chunk the thread cache does not take; else 0. A
 * header that cannot be read, because it is swapped out, may belong to a large block of unknown size: then the smallest size of a large
 * block is used. */
static __always_inline __u64 fp_large_bytes(__u64 block)
{
	__u64 field = 0, chunk;

	if (bpf_probe_read_user(&field, sizeof(field), (void *)(block - 8)))
		return FP_CHUNK_CACHED_MAX;
	chunk = field & ~FP_CHUNK_FLAGS;
	if (chunk <= FP_CHUNK_CACHED_MAX)
		return 0;
	return field & FP_CHUNK_MMAPPED ? chunk - FP_CHUNK_HEADER : chunk - FP_CHUNK_HEADER / 2;
}

static __always_inline bool fp_on_alternate_stack(struct task_struct *task, __u64 sp)
{
	__u64 begin = FP_KERNEL(task, sas_ss_sp);

	return sp > begin && sp - begin <= FP_KERNEL(task, sas_ss_size);
}

/* Whether an open call's frame is still on the stack of the entry at sp. */
static __always_inline bool fp_call_is_open(struct pt_regs *regs, struct fp_thread *thread, struct task_struct *task, __u64 sp,
					    struct fp_call *call)
{
	if (!thread->trampoline)
		thread->trampoline = BPF_CORE_READ(task, mm, uprobes_state.xol_area, vaddr);
	return fp_return_is_probed(regs, sp, call->sp, thread->trampoline);
}

/* Drops calls that never returned; returns whether the entry at sp is covered by a call that is still open. */
static __always_inline bool fp_is_nested(struct pt_regs *regs, struct fp_thread *thread, struct fp_target *target, __u64 sp, bool large)
{
	struct fp_calls *calls = fp_calls_of(thread, large);
	struct task_struct *task;
	struct fp_call *call;
	bool here, there;
	int i;

	if (!calls->depth)
		return false;
	task = fp_current_task();
	here = fp_on_alternate_stack(task, sp);
	for (i = 0; i < FP_CALLS_MAX; i++) {
		__u32 top = calls->depth - 1;

		if (top >= FP_CALLS_MAX)
			return false;
		call = &calls->open[top];
		there = fp_on_alternate_stack(task, call->sp);
		if (here && !there)
			return false; /* a signal handler interrupted that call */
		if (here == there && sp <= call->sp && fp_call_is_open(regs, thread, task, sp, call)) {
			fp_count(target, FP_CNT_NESTED);
			return true;
		}
		calls->depth = top;
		fp_count(target, FP_CNT_CALL_ABANDONED);
		__sync_fetch_and_add(&target->abandoned, 1);
	}
	return false;
}

/* Takes the stack at the probe; its hash. entry_sp: the stack pointer at the function's entry, 0 = not known. */
static __always_inline __u64 fp_take_stack(struct pt_regs *regs, struct fp_target *target, struct fp_thread *thread, __u64 cookie,
					   __u64 entry_sp)
{
	struct fp_walk *walk = &thread->walk;

	fp_walk_stack(walk, regs, target, entry_sp);
	return fp_publish_stack(walk, target, FP_COOKIE_SLOT(cookie));
}

static __always_inline void fp_send_free(struct fp_target *target, __u64 cookie, __u32 tid, __u8 kind, __u64 addr)
{
	struct fp_free *record = FP_RESERVE(struct fp_free, target, FP_COOKIE_SLOT(cookie), tid, kind, FP_COOKIE_FUNCTION(cookie),
					    FP_CNT_LOST_FREE);

	if (!record)
		return;
	record->addr = addr;
	fp_submit(record);
}

static __always_inline void fp_send_free_stack(struct fp_target *target, __u64 cookie, __u32 tid, __u64 addr, __u64 stack)
{
	struct fp_free_stack *record = FP_RESERVE(struct fp_free_stack, target, FP_COOKIE_SLOT(cookie), tid, FP_REC_FREE_STACK,
						  FP_COOKIE_FUNCTION(cookie), FP_CNT_LOST_FREE);

	if (!record)
		return;
	record->addr = addr;
	record->stack = stack;
	fp_submit(record);
}

static __always_inline void fp_send_alloc(struct fp_target *target, __u64 cookie, __u32 tid, __u64 addr, __u64 size, __u64 stack)
{
	struct fp_alloc *record = FP_RESERVE(struct fp_alloc, target, FP_COOKIE_SLOT(cookie), tid, FP_REC_ALLOC,
					     FP_COOKIE_FUNCTION(cookie), FP_CNT_LOST_ALLOC);

	if (!record)
		return;
	record->addr = addr;
	record->size = size;
	record->stack = stack;
	fp_submit(record);
}

/* Copies one word of a block, if the block has it, into the record. */
static __always_inline void fp_contents_word(struct fp_contents *record, __u32 at, __u64 addr, __u64 index)
{
	if (at < FP_WORDS && !bpf_probe_read_user(&record->words[at], 8, (void *)(addr + 8 * index)))
		record->known |= 1u << at;
}

/* Sends the contents of a block when it is allocated: words that are unchanged later were not written by its owner. For one block in
 * FP_CONTENTS_INTERVAL. */
static __always_inline void fp_send_contents(struct fp_target *target, __u64 cookie, __u32 tid, __u64 addr, __u64 size)
{
	__u64 words = size / 8, inner = words - FP_WORDS_HEAD - 2;
	struct fp_contents *record;
	__u32 i;

	if (words < 2 || bpf_get_prandom_u32() % FP_CONTENTS_INTERVAL)
		return;
	record = FP_RESERVE(struct fp_contents, target, FP_COOKIE_SLOT(cookie), tid, FP_REC_CONTENTS, FP_COOKIE_FUNCTION(cookie),
			    FP_CNT_LOST_CONTENTS);
	if (!record)
		return;
	record->addr = addr;
	record->known = 0;
	record->pad = 0;
	__builtin_memset(record->words, 0, sizeof(record->words));
	if (words >= FP_WORDS_HEAD) {
		if (!bpf_probe_read_user(record->words, 8 * FP_WORDS_HEAD, (void *)addr))
			record->known = (1u << FP_WORDS_HEAD) - 1;
	} else {
		for (i = 0; i < FP_WORDS_HEAD; i++)
			if (i < words)
				fp_contents_word(record, i, addr, i);
	}
	if (words >= FP_WORDS_HEAD + 2) {
		fp_contents_word(record, FP_WORDS - 2, addr, words - 2);
		fp_contents_word(record, FP_WORDS - 1, addr, words - 1);
	}
	if (words >= FP_WORDS)
		for (i = 0; i < FP_WORDS_SPREAD; i++)
			fp_contents_word(record, FP_WORDS_HEAD + i, addr, FP_WORDS_HEAD + i * inner / FP_WORDS_SPREAD);
	fp_submit(record);
}

/* Counts a hit; returns how many came before. */
static __always_inline __u64 fp_count_hit(struct fp_target *target)
{
#ifdef FP_LEGACY
	/* Before 5.12 atomic operations do not return the old value: a hit on another CPU in between moves the quota's end by one. */
	__sync_fetch_and_add(&target->hits, 1);
	return *(volatile unsigned long long *)&target->hits - 1;
#else
	return __sync_fetch_and_add(&target->hits, 1);
#endif
}

/* Switches a target off; returns whether it was on. */
static __always_inline bool fp_switch_off(struct fp_target *target)
{
#ifdef FP_LEGACY
	__u32 flags = *(volatile unsigned int *)&target->flags;

	/* Nor is there an atomic AND. If the daemon switches the target on at this very moment, the window stays closed. */
	*(volatile unsigned int *)&target->flags = flags & ~FP_TARGET_ON;
	return flags & FP_TARGET_ON;
#else
	return __sync_fetch_and_and(&target->flags, ~FP_TARGET_ON) & FP_TARGET_ON;
#endif
}

/* Counts a hit, and switches the target off when its quota is spent or its window is over: a burst must not cost more than is allowed,
 * and a window must not be longer than planned, however late the daemon gets to run. */
static __always_inline void fp_spend(struct fp_target *target, __u64 cookie)
{
	bool spent, over;
	__u64 now;

	if (FP_COOKIE_OP(cookie) == FP_OP_FREE || FP_COOKIE_OP(cookie) == FP_OP_LARGE_FREE)
		__sync_fetch_and_add(&target->hits_free, 1);
	if (FP_COOKIE_STEPPED(cookie))
		__sync_fetch_and_add(&target->hits_stepped, 1);
	spent = fp_count_hit(target) >= target->quota_end;
	if (!(target->flags & FP_TARGET_ON))
		return;
	now = bpf_ktime_get_ns();
	over = now >= target->deadline_ns;
	if (!spent && !over)
		return;
	if (!fp_switch_off(target))
		return;
	target->quota_end = *(volatile unsigned long long *)&target->hits;
	if (!over)
		target->closed_ns = now;
}

/* Whether a child of vfork has called exec: from then on it has its own memory, with other probes. Its first thread's flag is checked,
 * because a new thread has it, too. */
static __always_inline bool fp_has_left(__u64 cookie)
{
	return FP_COOKIE_VFORK(cookie) && !(FP_KERNEL(fp_current_task(), group_leader, flags) & FP_PF_FORKNOEXEC);
}

/* A site's target if its calls are wanted. Each hit is counted, and the reason if it is not wanted: the daemon compares the sum with the
 * records that arrived, so that no kernel loses any unnoticed. */
static __always_inline struct fp_target *fp_target_on(__u64 cookie)
{
	__u32 slot = FP_COOKIE_SLOT(cookie);
	struct fp_target *target = bpf_map_lookup_elem(&targets, &slot);

	if (target && !target->generation)
		target = NULL;
	fp_count(target, FP_CNT_HIT);
	if (!target) {
		fp_count(target, FP_CNT_UNKNOWN_SITE);
		return NULL;
	}
	if (!target->tgid) {
		fp_count(target, FP_CNT_STALE_SLOT);
		return NULL;
	}
	if (target->flags & FP_TARGET_GOVERNED)
		fp_spend(target, cookie);
	if (target->flags & FP_TARGET_ON && !fp_has_left(cookie))
		return target;
	fp_count(target, FP_CNT_HIT_OFF);
	return NULL;
}

/* The time that a program takes, by the clock. The walk of a stack is most of it, and depends on the stack: so the cost of a hit is
 * measured in each process, not taken from another one. */
struct fp_span {
	__u64 began_ns; /* 0 = not measured */
	__u64 switches;
};

/* Number of voluntary and involuntary context switches of the thread. */
static __always_inline __u64 fp_switches(void)
{
	struct task_struct *task = fp_current_task();

	return FP_KERNEL(task, nvcsw) + FP_KERNEL(task, nivcsw);
}

static __always_inline void fp_span_begin(struct fp_target *target, struct fp_span *span)
{
	span->began_ns = 0;
	if (!(target->flags & FP_TARGET_GOVERNED))
		return;
	span->switches = fp_switches();
	span->began_ns = bpf_ktime_get_ns();
}

static __always_inline void fp_span_end(struct fp_target *target, struct fp_span *span)
{
	__u64 took;

	if (!span->began_ns)
		return;
	took = bpf_ktime_get_ns() - span->began_ns;
	if (fp_switches() == span->switches)
		__sync_fetch_and_add(&target->programs_ns, took);
}

/* The stack pointer as it was at the entry of the function that the site is in. */
static __always_inline __u64 fp_entry_sp(struct pt_regs *regs, __u64 cookie)
{
	return FP_SP(regs) + 8 * FP_COOKIE_SP_WORDS(cookie);
}

/* At the site of a function that frees. Whether it is called from inside an allocating one is not checked, which saves a lookup of the
 * thread's state: such a free is of a block that the daemon does not know, or of one that a realloc has already reported as freed. */
static __always_inline void fp_free_enter_on(struct pt_regs *regs, struct fp_target *target, __u64 cookie)
{
	struct fp_thread *thread;
	__u32 tid;
	__u64 ptr;

	ptr = fp_register(regs, FP_COOKIE_PTR_REG(cookie));
	if (!ptr) {
		fp_count(target, FP_CNT_HIT_NULL);
		return;
	}
	tid = (__u32)bpf_get_current_pid_tgid();
	if (target->flags & FP_TARGET_FREE_STACKS && (thread = fp_thread_of_current(target)))
		fp_send_free_stack(target, cookie, tid, ptr, fp_take_stack(regs, target, thread, cookie, fp_entry_sp(regs, cookie)));
	else
		fp_send_free(target, cookie, tid, FP_REC_FREE, ptr);
}

static __always_inline void fp_free_enter(struct pt_regs *regs, __u64 cookie)
{
	struct fp_target *target;
	struct fp_span span;

	if (FP_COOKIE_OP(cookie) == FP_OP_ENTRY) {
		fp_hold();
		return;
	}
	target = fp_target_on(cookie);
	if (!target)
		return;
	fp_span_begin(target, &span);
	fp_free_enter_on(regs, target, cookie);
	fp_span_end(target, &span);
}

/* Stores a call that was entered; returns its sequence number, by which its return is recognised. A realloc's old block counts as freed
 * from here on. */
static __always_inline __u64 fp_open_new_call(struct fp_target *target, struct fp_thread *thread, const struct fp_call *entered, __u64 cookie,
					      bool large)
{
	struct fp_calls *calls = fp_calls_of(thread, large);
	struct fp_call *call;
	__u32 top;

	if (FP_COOKIE_OP(cookie) == FP_OP_REALLOC && entered->ptr)
		fp_send_free(target, cookie, thread->tid, FP_REC_REALLOC_FREE, entered->ptr);

	top = calls->depth;
	if (top >= FP_CALLS_MAX) {
		top = FP_CALLS_MAX - 1;
		fp_count(target, FP_CNT_CALL_ABANDONED);
		__sync_fetch_and_add(&target->abandoned, 1);
	}
	call = &calls->open[top];
	call->sp = entered->sp;
	call->size = entered->size;
	call->ptr = entered->ptr;
	call->stack = entered->stack;
	call->sequence = ++thread->sequence;
#ifdef FP_LEGACY
	call->cookie = cookie;
#endif
	calls->depth = top + 1;
	calls->slot = FP_COOKIE_SLOT(cookie);
	return call->sequence;
}

/* At the site of a function that allocates. Returns the call's sequence number if its return is wanted, else 0. */
static __always_inline __u64 fp_alloc_enter_on(struct pt_regs *regs, struct fp_target *target, __u64 cookie)
{
	struct fp_call call = {};
	struct fp_thread *thread;

	call.size = fp_size_of(regs, cookie);
	if (FP_COOKIE_MAY_THROW(cookie) && (call.size >= FP_THROW_BYTES || target->flags & FP_TARGET_LIMITED)) {
		fp_count(target, FP_CNT_NOT_FOLLOWED);
		return 0;
	}
	if (FP_COOKIE_PTR_REG(cookie) != FP_NO_REG)
		call.ptr = fp_register(regs, FP_COOKIE_PTR_REG(cookie));
	thread = fp_thread_of_current(target);
	if (!thread) {
		fp_lost(target, FP_CNT_LOST_ALLOC);
		return 0;
	}
	call.size = fp_with_alignment(regs, cookie, call.size);
	call.sp = fp_entry_sp(regs, cookie);
	if (fp_is_nested(regs, thread, target, call.sp, false))
		return 0;
	if (target->flags & FP_TARGET_STACKS)
		call.stack = fp_take_stack(regs, target, thread, cookie, call.sp);
	return fp_open_new_call(target, thread, &call, cookie, false);
}

static __always_inline __u64 fp_alloc_enter(struct pt_regs *regs, __u64 cookie)
{
	struct fp_target *target = fp_target_on(cookie);
	struct fp_span span;
	__u64 sequence;

	if (!target)
		return 0;
	fp_span_begin(target, &span);
	sequence = fp_alloc_enter_on(regs, target, cookie);
	fp_span_end(target, &span);
	return sequence;
}

/* At the return of the call with this sequence number (session), or of the call whose frame the stack pointer has just left
 * (sequence 0: entry and return are separate links, and returns of nested calls come here too). */
static __always_inline void fp_alloc_return_on(struct pt_regs *regs, struct fp_target *target, __u64 cookie, __u64 sequence, bool large)
{
	__u32 op = FP_COOKIE_OP(cookie), top;
	struct fp_thread *thread;
	struct fp_calls *calls;
	struct fp_call call;
	__u64 result = FP_RESULT(regs), block = 0;
	int i;

	thread = fp_thread_find();
	if (!thread)
		return;
	calls = fp_calls_of(thread, large);
	for (i = 0; i < FP_CALLS_MAX; i++) {
		top = calls->depth - 1;
		if (top >= FP_CALLS_MAX)
			break;
		if (sequence ? calls->open[top].sequence == sequence : calls->open[top].sp + FP_RETURN_POPS == FP_SP(regs))
			goto found;
		if (!sequence)
			return;
		calls->depth = top;
		fp_count(target, FP_CNT_CALL_ABANDONED);
		__sync_fetch_and_add(&target->abandoned, 1);
	}
	if (sequence)
		fp_count(target, FP_CNT_RETURN_UNMATCHED);
	return;
found:
	call = calls->open[top & (FP_CALLS_MAX - 1)];
	calls->depth = top;

	switch (op) {
	case FP_OP_POSIX_MEMALIGN:
		if (!(__u32)result)
			bpf_probe_read_user(&block, sizeof(block), (void *)call.ptr);
		break;
	case FP_OP_XALLOCX:
		/* Less than requested: not resized, the block is unchanged. */
		if (result < call.size)
			break;
		/* Resized in place: the block is the same, its usable size is the result. */
		fp_send_free(target, cookie, thread->tid, FP_REC_FREE, call.ptr);
		block = call.ptr;
		call.size = result;
		break;
	case FP_OP_REALLOC:
		block = result;
		/* realloc(p, 0) that returns NULL has freed the block (glibc, tcmalloc); with a size it has failed. reallocf frees then too. */
		if (!block && call.ptr && call.size && !FP_COOKIE_FREES_ON_FAILURE(cookie))
			fp_send_free(target, cookie, thread->tid, FP_REC_REALLOC_FAIL, call.ptr);
		break;
	case FP_OP_ALLOC_STRING:
		block = result;
		call.size = block ? fp_string_bytes(block) : 0;
		if (block && !call.size)
			fp_count(target, FP_CNT_STRING_CUT);
		break;
	default:
		block = result;
	}
	if (!block) {
		fp_count(target, FP_CNT_ALLOC_FAILED);
		return;
	}
	if (large) {
		call.size = fp_large_bytes(block);
		if (!call.size) {
			fp_count(target, FP_CNT_HIT_SMALL);
			return;
		}
	}
	fp_send_alloc(target, cookie, thread->tid, block, call.size, call.stack);
	if (target->flags & FP_TARGET_CONTENTS)
		fp_send_contents(target, cookie, thread->tid, block, call.size & FP_ALLOC_SIZE_MASK);
}

static __always_inline void fp_alloc_return(struct pt_regs *regs, __u64 cookie, __u64 sequence, bool large)
{
	struct fp_target *target = fp_target_of(FP_COOKIE_SLOT(cookie));
	struct fp_span span;

	if (!target)
		return;
	fp_span_begin(target, &span);
	if (span.began_ns)
		__sync_fetch_and_add(&target->returns, 1);
	fp_alloc_return_on(regs, target, cookie, sequence, large);
	fp_span_end(target, &span);
}

#endif
