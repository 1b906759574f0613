/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * Stops a thread that the daemon traces before it executes code that the daemon has not probed yet.
 *
 * A signal to a traced thread stops it for its tracer first, on the way back to user space: before the next instruction. The tracer
 * (src/session/attach/tracer.rs) lets the daemon attach probes, and resumes the thread without the signal; nothing else sees it. SIGURG is
 * ignored by default, so one that is delivered after the tracer has ended does no harm. A thread that blocks it is not stopped: SIGSTOP,
 * which cannot be blocked, would stop it for good if the tracer were killed meanwhile.
 */
#ifndef FRAGPROF_HOLD_BPF_H
#define FRAGPROF_HOLD_BPF_H

#include "kernel.bpf.h"

/* asm-generic/signal.h; the same on every architecture that fragprof supports. */
#define FP_SIGURG 23

/* Whether the thread stops before its next instruction. */
static __always_inline bool fp_hold(void)
{
	struct task_struct *task = fp_current_task();

	if (!FP_KERNEL(task, ptrace) || FP_KERNEL(task, blocked.sig[0]) >> (FP_SIGURG - 1) & 1)
		return false;
	return bpf_send_signal_thread(FP_SIGURG) == 0;
}

#endif
