/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * The wire format: every type that crosses between the BPF programs and the daemon.
 *
 * Included by the BPF object and by the unwinder's host build. The daemon's side, src/bpf.rs, is generated from it: shared.bpf.c lists what
 * is shared. Plain fixed-width types only, no implicit padding.
 *
 * Times are CLOCK_MONOTONIC nanoseconds. Addresses are user addresses of the watched process.
 */
#ifndef FRAGPROF_H
#define FRAGPROF_H

enum fp_limit {
	/* Watched processes at a time. A slot is an index into the target table and travels in every record and cookie, so that no program
	 * needs a hash lookup to know whose event it sees. 1024 x 128 B = 128 KiB. */
	FP_TARGETS_MAX = 1024,

	/* Frames of one stack, unless more are requested. Real stacks of servers and JVMs stay below 100; 128 x 8 B = 1 KiB a definition. */
	FP_FRAMES_MAX = 128,

	/* Frames of one stack that can be requested: as many times FP_FRAMES_MAX as fit into task storage beside a record's head (deep.bpf.h). */
	FP_FRAMES_DEEP_MAX = 7 * FP_FRAMES_MAX,

	/* Ring buffers. Each recording has one of its own, and a row of counters; a target's records all go through one and so keep their
	 * order. */
	FP_SHARDS_MAX = 16,

	/* Targets of one process at a time: recordings that watch it in different ways, each with its own ring, stack table and losses. The agent
	 * has three at most: exactly, by an emitter, in windows. */
	FP_SLOTS_OF_PROCESS = 4,

	/* Rows with the locations of the arguments of programs' own probes (USDT). They are shared by sites with the same arguments:
	 * compilers place three arguments in about a dozen ways. */
	FP_USDT_SITES_MAX = 1024,
};

/* Allocator calls of one thread that may be open at once without being nested: one, plus signal handlers on an alternate stack that
 * interrupt it. A call beyond the limit replaces the oldest and is counted (FP_CNT_CALL_ABANDONED). */
#define FP_CALLS_MAX 4

/* The kind of a record: its first byte. */
enum fp_record_kind {
	FP_REC_ALLOC = 1,        /* struct fp_alloc: a block was allocated */
	FP_REC_FREE = 2,         /* struct fp_free: a block is about to be freed (sent at entry) */
	FP_REC_REALLOC_FREE = 3, /* struct fp_free: as FREE, by realloc; undone by REALLOC_FAIL of the same thread */
	FP_REC_REALLOC_FAIL = 4, /* struct fp_free: the realloc failed, the block is still live */
	FP_REC_STACK = 5,        /* struct fp_stack: defines a stack hash, before the first record that uses it */
	FP_REC_VM = 6,           /* struct fp_vm: the address space changed */
	FP_REC_EXEC = 7,         /* struct fp_life: the process replaced its image */
	FP_REC_FORK = 8,         /* struct fp_life: a child exists; other = child's pid */
	FP_REC_EXIT = 9,         /* struct fp_life: the process has ended (last thread); other = exit code */
	FP_REC_NEED_TABLE = 10,  /* struct fp_need_table: a pc had no unwind table yet */
	FP_REC_FREE_STACK = 11,  /* struct fp_free_stack: as FREE, with its stack (--free-stacks) */
	FP_REC_SAMPLE = 12,      /* struct fp_sample: the program itself reports an allocation, and how many bytes it represents */
	FP_REC_CONTENTS = 13,       /* struct fp_contents: contents of the block of the ALLOC before it, as allocated; for some blocks */
	FP_REC_PYTHON_STACK = 14,   /* struct fp_python_stack: the Python frames of the STACK that follows it */
	FP_REC_PYTHON_CODE = 15,    /* struct fp_python_code: what a code object says, before the first PYTHON_STACK that names it */
	FP_REC_THREAD_EXIT = 16,    /* struct fp_life: a thread has ended, and others of its process have not */
};

/* Starts every record. 16 bytes: at a million records per second each byte is a megabyte through the caches of the watched process. */
struct fp_head {
	unsigned char kind;       /* enum fp_record_kind */
	unsigned char function;   /* index into the daemon's function table: which entry point (malloc, calloc, ...) */
	unsigned short slot;      /* target slot, < FP_TARGETS_MAX */
	unsigned int tid;         /* kernel thread id, initial pid namespace */
	unsigned long long stamp; /* low 48 bits: CLOCK_MONOTONIC, ns, wraps after 78 h (the reader knows the rest); high 16 bits: low bits
	                           * of the slot's generation, by which a record of its former owner is recognised */
};
enum fp_stamp {
	FP_STAMP_TIME_BITS = 48,
};

/* FP_REC_ALLOC. 40 bytes. */
struct fp_alloc {
	struct fp_head head;
	unsigned long long addr;  /* block allocated, never 0 */
	unsigned long long size;  /* bytes requested; in the bits from FP_ALLOC_SIZE_BITS on log2 of the requested alignment, 0 = none */
	unsigned long long stack; /* stack hash, 0 = none could be taken (counted by reason) */
};
enum fp_alloc_bits {
	FP_ALLOC_SIZE_BITS = 56,
};

/* FP_REC_SAMPLE. 56 bytes. Its free is an FP_REC_FREE. */
struct fp_sample {
	struct fp_head head;
	unsigned long long addr;     /* block allocated, never 0 */
	unsigned long long size;     /* bytes requested */
	unsigned long long weight;   /* bytes it represents, as the program states */
	unsigned long long interval; /* mean distance of sample points by which it was drawn, bytes; 0 = the program does not state it */
	unsigned long long stack;    /* stack hash, 0 = none */
};

/* Words by which a block is recognised: the first eight, six spread over the middle, the last two. A smaller block has fewer. */
enum fp_words {
	FP_WORDS_HEAD = 8,
	FP_WORDS_SPREAD = 6,
	FP_WORDS = FP_WORDS_HEAD + FP_WORDS_SPREAD + 2,
};

/* One in so many allocations, at random, is sent with its words: reading them takes a tenth of the time of a hit. */
#define FP_CONTENTS_INTERVAL 4

/* FP_REC_CONTENTS. 160 bytes. */
struct fp_contents {
	struct fp_head head;
	unsigned long long addr;
	unsigned int known; /* bit i: words[i] could be read */
	unsigned int pad;
	unsigned long long words[FP_WORDS];
};

/* FP_REC_FREE, FP_REC_REALLOC_FREE, FP_REC_REALLOC_FAIL. 24 bytes. */
struct fp_free {
	struct fp_head head;
	unsigned long long addr;
};

/* FP_REC_FREE_STACK. 32 bytes. */
struct fp_free_stack {
	struct fp_head head;
	unsigned long long addr;
	unsigned long long stack; /* stack hash */
};

/* Why a walk ended. Stored in each stack, counted, shown. */
enum fp_unwind_end {
	FP_END_NONE = 0,           /* not ended: never on the wire */
	FP_END_COMPLETE = 1,       /* reached the thread's or the process's entry: undefined return address */
	FP_END_FRAME_LIMIT = 2,    /* the configured limit, FP_FRAMES_MAX by default */
	FP_END_NO_MAPPING = 3,     /* pc in no known executable mapping */
	FP_END_NO_TABLE = 4,       /* the mapping's table is not loaded (yet, or refused by the budget) */
	FP_END_NO_ROW = 5,         /* the table has no row for this pc */
	FP_END_UNSUPPORTED = 6,    /* a rule of a form the unwinder does not evaluate */
	FP_END_READ_FAULT = 7,     /* stack memory could not be read (swapped out, guard page) */
	FP_END_NO_PROGRESS = 8,    /* the CFA did not rise: corrupt stack or table */
	FP_END_BAD_PC = 9,         /* return address 0 or outside user space, where a frame was expected */
	FP_END_JIT = 10,           /* a JIT or interpreter region whose frame pointers do not hold */
	FP_END_TRAMPOLINE = 11,    /* a return trampoline whose original address was not found */
	FP_END_FRAME_POINTERS_ONLY = 12, /* walked by frame pointers alone: may be wrong */
	FP_END_MAX
};

/* A frame word: its kind in the top four bits, flags in the four below, the address below them. Kinds of managed frames have other contents
 * (enum fp_frame_kind). */
enum fp_frame_bits {
	FP_FRAME_ADDR_BITS = 56,
	FP_FRAME_EXACT_BIT = 56,   /* the address is the instruction itself (leaf, interrupted frame), not a return address */
	FP_FRAME_GUESSED_BIT = 57, /* found by a guarded frame-pointer step */
	FP_FRAME_JIT_BIT = 58,     /* in an anonymous executable region */
	FP_FRAME_SIGNAL_BIT = 59,  /* a signal trampoline */
	FP_FRAME_KIND_BIT = 60,    /* enum fp_frame_kind */
	/* FP_FRAME_KIND_JAVA_COMPILED: low bits of the return address's distance from the begin of the code cache, which has 2 GiB at most, and
	 * above them low bits of the compilation's number, which tells it from other code at the same address. */
	FP_FRAME_CODE_BITS = 31,
	FP_FRAME_COMPILE_BITS = 25,
	/* FP_FRAME_KIND_JAVA_INTERPRETED: low bits of the bytecode's address, as many as tell the index in a method of 64 KiB; above them the
	 * address of the Method, a multiple of 8 below 2^48, whose highest bit is the lowest one of the kind. No flags. */
	FP_FRAME_BYTECODE_BITS = 16,
	FP_FRAME_METHOD_BITS = 45,
};
#define FP_FRAME_ADDR_MASK ((1ULL << FP_FRAME_ADDR_BITS) - 1)
#define FP_FRAME_EXACT (1ULL << FP_FRAME_EXACT_BIT)
#define FP_FRAME_GUESSED (1ULL << FP_FRAME_GUESSED_BIT)
#define FP_FRAME_JIT (1ULL << FP_FRAME_JIT_BIT)
#define FP_FRAME_SIGNAL (1ULL << FP_FRAME_SIGNAL_BIT)
#define FP_FRAME_KIND(word) ((unsigned int)((word) >> FP_FRAME_KIND_BIT))
#define FP_FRAME_IS_INTERPRETED(word) ((FP_FRAME_KIND(word) & ~1U) == FP_FRAME_KIND_JAVA_INTERPRETED)

/* What a frame word is. */
enum fp_frame_kind {
	FP_FRAME_KIND_NATIVE = 0,           /* flags, address */
	FP_FRAME_KIND_JAVA_COMPILED = 1,    /* flags, FP_FRAME_CODE_BITS, FP_FRAME_COMPILE_BITS */
	FP_FRAME_KIND_JAVA_INTERPRETED = 2, /* FP_FRAME_BYTECODE_BITS, FP_FRAME_METHOD_BITS */
	FP_FRAME_KIND_JAVA_INTERPRETED_HIGH = 3, /* the same, of a Method at 2^47 or above, as arm64 has them */
	FP_FRAME_KIND_JAVA_STUB = 4,        /* flags, address: generated by the JVM for itself */
	FP_FRAME_KIND_NAMED = 15,           /* the daemon's, never on the wire: number of a managed frame whose name is known */
};

/* FP_REC_STACK: header, then len frame words, leaf first. 32 bytes + 8 len. */
struct fp_stack {
	struct fp_head head;
	unsigned long long hash;  /* of (slot generation, frames, end); never 0 */
	unsigned short len;       /* frames that follow, <= FP_FRAMES_DEEP_MAX */
	unsigned char end;        /* enum fp_unwind_end */
	unsigned char pad[5];
	unsigned long long frames[]; /* FP_FRAME_* | address */
};

/* One Python frame. 16 bytes. */
struct fp_python_frame {
	unsigned long long code;  /* address of the code object */
	int instruction;          /* of the bytecode: bytes, 3.10: units of two; below 0 = none was executed yet */
	unsigned short native;    /* index of the native frame of the evaluation loop's call, in the outermost frame of each call;
				   * FP_PYTHON_OUTSIDE = beyond the last native frame, FP_PYTHON_UNKNOWN = the next one of the loop */
	unsigned short flags;     /* FP_PYTHON_OUTERMOST, FP_PYTHON_UNREADABLE */
};

enum fp_python_frame_flag {
	FP_PYTHON_OUTERMOST = 1 << 0,  /* the call's outermost frame */
	FP_PYTHON_UNREADABLE = 1 << 1, /* its code object could not be read */
};

enum fp_python_wire {
	/* Python frames of one stack. Web frameworks have about 60, recursive programs any number. 192 x 16 B = 3 KiB. */
	FP_PYTHON_FRAMES_MAX = 192,
	FP_PYTHON_OUTSIDE = 0xfffe,
	FP_PYTHON_UNKNOWN = 0xffff,
	/* Bytes of a code object's texts and of each part of its lines' table that are sent. Names of functions have less than 100 bytes, paths less
	 * than 300; the tables of functions have less than 1 KiB. */
	FP_PYTHON_NAME_BYTES = 256,
	FP_PYTHON_FILE_BYTES = 512,
	FP_PYTHON_LINES_BYTES = 2048,
	/* Bytes of a lines' table that are sent in all: of modules with some 20,000 lines. The daemon reads longer ones from memory. */
	FP_PYTHON_LINES_MAX = 65536,
};

/* Why the walk of Python frames ended. */
enum fp_python_end {
	FP_PYTHON_END_COMPLETE = 0,
	FP_PYTHON_END_LIMIT = 1,      /* FP_PYTHON_FRAMES_MAX */
	FP_PYTHON_END_UNREADABLE = 2, /* a frame could not be read */
	FP_PYTHON_END_NO_THREAD = 3,  /* the evaluation loop is on the stack, but the interpreter does not know the thread */
};

/* FP_REC_PYTHON_STACK. 32 bytes + 16 len. */
struct fp_python_stack {
	struct fp_head head;
	unsigned long long hash; /* the stack's, as in its STACK */
	unsigned short len;      /* frames that follow, innermost first */
	unsigned char end;       /* enum fp_python_end */
	unsigned char pad[5];
	struct fp_python_frame frames[];
};

/* A text object or, without a state, a bytes object. */
struct fp_python_text {
	unsigned long long object; /* its address; 0 = none */
	unsigned long long length; /* characters, or bytes */
	unsigned int state;        /* of a text: how it is encoded */
	unsigned int bytes;        /* of it that were read, and are sent */
};

/* FP_REC_PYTHON_CODE. A part of the lines' table ends the record. */
struct fp_python_code {
	struct fp_head head;
	unsigned long long code;  /* address */
	unsigned int first_line;
	unsigned int version;
	unsigned int lines_at;    /* place of the part of the lines' table; the texts are sent with the first part only */
	unsigned int pad;
	struct fp_python_text name;
	struct fp_python_text file;
	struct fp_python_text lines;
	unsigned char name_bytes[FP_PYTHON_NAME_BYTES];
	unsigned char file_bytes[FP_PYTHON_FILE_BYTES];
	unsigned char line_bytes[];
};

/* What happened to the address space. */
enum fp_vm_op {
	FP_VM_MMAP = 1,    /* addr, len, prot, flags as granted */
	FP_VM_MUNMAP = 2,  /* addr, len */
	FP_VM_MREMAP = 3,  /* addr = old address, len = old length, addr2 = new address, len2 = new length, flags */
	FP_VM_BRK = 4,     /* addr = break after the call */
	FP_VM_MADVISE = 5, /* addr, len, flags = advice */
	FP_VM_MPROTECT = 6,/* addr, len, prot */
	FP_VM_TOUCH = 7,   /* first touch of a page, sampled: addr, len2 = faults that this one represents; stack: of the access */
};

/* FP_REC_VM. 80 bytes. Only calls that succeeded. head.function is 1 if the thread is stopped at it (hold.bpf.h). */
struct fp_vm {
	struct fp_head head;
	unsigned long long addr;
	unsigned long long len;
	unsigned long long addr2;
	unsigned long long len2;
	unsigned int op;          /* enum fp_vm_op */
	unsigned int prot;        /* PROT_* */
	unsigned int flags;       /* MAP_* or the advice */
	int fd;                   /* mmap's file descriptor, -1 = anonymous */
	unsigned long long stack; /* of the allocator call that made it: hash, 0 = none */
	unsigned long long request; /* bytes that the call requests */
};

/* FP_REC_EXEC, FP_REC_FORK, FP_REC_EXIT, FP_REC_THREAD_EXIT. 40 bytes. Of a fork, head.function is 1 if the child runs in its parent's memory (vfork). */
struct fp_life {
	struct fp_head head;
	unsigned int pid;
	unsigned int other;
	char comm[16];            /* as the kernel has it, may hold any byte; ends at the first 0 */
};

/* FP_REC_NEED_TABLE. 24 bytes. */
struct fp_need_table {
	struct fp_head head;
	unsigned long long pc;
};

/* The programs' counters, per CPU, summed by the daemon; each is shown to the user (names and descriptions: src/capture/counters.rs).
 * Records sent are counted by the reader. */
enum fp_counter {
	FP_CNT_LOST_ALLOC = 0,     /* ring full: allocation record lost */
	FP_CNT_LOST_FREE,          /* ring full: free record lost */
	FP_CNT_LOST_STACK,         /* ring full: stack definition lost, sent again with the next use */
	FP_CNT_LOST_VM,            /* ring full: address-space record lost */
	FP_CNT_LOST_LIFE,          /* ring full: life-cycle record lost */
	FP_CNT_NESTED,             /* inner allocator calls that an outer one already covers */
	FP_CNT_CALL_ABANDONED,     /* calls that never returned (longjmp, exception, cancelled thread) */
	FP_CNT_RETURN_UNMATCHED,   /* returns without their entry */
	FP_CNT_NO_THREAD_STATE,    /* thread state could not be allocated: event lost */
	FP_CNT_NO_WALK_STATE,      /* walk state could not be allocated: stack lost */
	FP_CNT_STALE_SLOT,         /* hits for a process that was released while its probes were being detached: not wanted */
	FP_CNT_STACK_TABLE_FULL,   /* a definition could not be marked as sent: it is sent again with the next use */
	FP_CNT_NOT_FOLLOWED,       /* calls of a throwing operator new whose return cannot be probed safely: they may fail */
	FP_CNT_ALLOC_FAILED,       /* allocator calls that returned failure */
	FP_CNT_WALK,               /* stacks walked, except those of the next counter */
	FP_CNT_WALK_REUSED,        /* whole walks proven unchanged and reused, all of them complete */
	FP_CNT_WALK_TAIL_REUSED,   /* walks of which some frames were proven unchanged and reused */
	FP_CNT_FRAMES,             /* frames found by the tables */
	FP_CNT_ARGUMENT_UNREADABLE, /* arguments of a program's own probes whose memory could not be read */
	FP_CNT_HIT,                /* hits of probes at entries: each results in a record, or in one of the other counts */
	FP_CNT_HIT_OFF,            /* hits while the process was switched off: between windows, or while probes were attached and detached */
	FP_CNT_HIT_NULL,           /* hits without a block: free(NULL) */
	FP_CNT_UNKNOWN_SITE,       /* hits with a cookie of no process that was ever watched: calls lost */
	FP_CNT_LOST_CONTENTS,         /* ring full: record of a new block's contents lost */
	FP_CNT_HIT_SMALL,          /* hits of probes for large blocks by calls for a small one: a miss of the thread cache, a small realloc */
	FP_CNT_PYTHON_UNREAD,      /* stacks whose Python frames could not be read, or not all of them: unreadable memory, no thread state */
	FP_CNT_STRING_CUT,         /* copies of strings whose end was not found within FP_STRING_BYTES_MAX, or could not be read */
	FP_CNT_MAX
};

/* One row for each ring, and a last one, FP_SHARDS_MAX, for hits whose target is not known. */
struct fp_counters {
	unsigned long long value[FP_CNT_MAX];
	unsigned long long ends[FP_END_MAX]; /* walks by enum fp_unwind_end */
};

/* The targets of a process. Unused entries hold FP_TARGETS_MAX, which is not a slot. */
struct fp_slots {
	unsigned int slot[FP_SLOTS_OF_PROCESS];
};

/* A target's row in the target table, written by the daemon, counts by the programs. 128 bytes; a recording in exact mode touches only the
 * first cache line. */
struct fp_target {
	unsigned int tgid;        /* 0 = slot free */
	unsigned int generation;  /* raised each time the slot gets a new owner */
	unsigned int shard;       /* ring buffer that carries this process's records */
	unsigned int flags;       /* FP_TARGET_* */
	unsigned long long lost_alloc; /* records lost of this target, by kind: its ledger is lossy from the first on */
	unsigned long long lost_free;
	unsigned long long lost_other;
	unsigned long long abandoned;  /* calls that never returned */
	unsigned long long touch_interval; /* one in so many first touches is recorded, at random; 0 = none */
	unsigned long long mm_id;      /* identifies the address space for the unwinder's mapping table (the pid of its owner) */
	/* For governed targets. */
	unsigned long long hits;       /* probe hits, whether or not the target was on: all of them cost the target time */
	unsigned long long hits_free;  /* of them, at functions that free */
	unsigned long long quota_end;  /* value of hits at which the programs switch the target off by themselves; once they did so, for
					 * this reason or because the window was over, the value at that moment */
	unsigned long long closed_ns;  /* when they did so, CLOCK_MONOTONIC; 0 = they did not */
	unsigned long long deadline_ns; /* when the window is over, CLOCK_MONOTONIC: the first hit after it switches the target off */
	unsigned int epoch;       /* of probes for large blocks: a new number each time that they are attached */
	unsigned int hits_stepped; /* of the hits, at instructions that the kernel single-steps; begins again at 0 after the last number */
	unsigned long long returns;    /* returns that were probed */
	unsigned long long programs_ns; /* time that the programs took at entries and returns, without those that were interrupted by another
					 * thread */
};
enum fp_target_flag {
	FP_TARGET_STACKS = 1 << 0,      /* take stacks */
	FP_TARGET_FREE_STACKS = 1 << 1, /* take stacks of frees too */
	FP_TARGET_VM = 1 << 2,          /* send address-space records */
	FP_TARGET_ON = 1 << 3,          /* take new calls; set when all probes are attached, cleared before the first is detached, so that no
					 * block is seen allocated whose free would be missed */
	FP_TARGET_GOVERNED = 1 << 4,    /* count hits, and switch off when the quota is spent */
	FP_TARGET_GROWTH = 1 << 5,      /* take the stack of growth of the address space even outside a recorded allocator call */
	FP_TARGET_CONTENTS = 1 << 6,      /* send the contents of some blocks when they are allocated */
	FP_TARGET_LIMITED = 1 << 7,     /* its memory is limited: any operator new may fail, so no return of a throwing one is probed */
	FP_TARGET_HELD = 1 << 8,        /* the daemon traces it: it is stopped where it maps code and at its entry point (hold.bpf.h) */
};

/* The cookie of a probe site: which call it is and where its arguments are. Built by src/probe/, decoded in alloc.bpf.h.
 * Registers are DWARF numbers (src/machine/). */
enum fp_op {
	FP_OP_ALLOC = 1,        /* size in size_reg, times count_reg if present; result is the block */
	FP_OP_FREE = 2,         /* block in ptr_reg; no return probe */
	FP_OP_REALLOC = 3,      /* block in ptr_reg, new size in size_reg (times count_reg); result is the block */
	FP_OP_POSIX_MEMALIGN = 4, /* size in size_reg, address of the result in ptr_reg; result 0 = success */
	FP_OP_XALLOCX = 5,      /* block in ptr_reg resized in place; result is its usable size */
	FP_OP_LARGE_ALLOC = 6,  /* an instruction of glibc that new blocks pass: in ptr_reg, 0 = failed; no return probe (large.bpf.h) */
	FP_OP_LARGE_FREE = 7,   /* likewise, that freed blocks pass */
	FP_OP_ENTRY = 8,        /* the program's entry point: the thread is stopped there (hold.bpf.h) */
	FP_OP_ALLOC_STRING = 9, /* result is the block, a string: its size is that of the string with its end */
};
enum fp_cookie_shift {
	FP_COOKIE_OP_SHIFT = 0,         /* 8 bits: enum fp_op */
	FP_COOKIE_FUNCTION_SHIFT = 8,   /* 8 bits */
	FP_COOKIE_SIZE_REG_SHIFT = 16,  /* 5 bits each, FP_NO_REG = the call has no such argument */
	FP_COOKIE_COUNT_REG_SHIFT = 21,
	FP_COOKIE_PTR_REG_SHIFT = 26,
	FP_COOKIE_SLOT_SHIFT = 32,      /* 16 bits */
	FP_COOKIE_SP_WORDS_SHIFT = 48,  /* 8 bits: words pushed between entry and site */
	FP_COOKIE_MAY_THROW_SHIFT = 56, /* 1 bit: fails by a C++ exception */
	FP_COOKIE_FREES_ON_FAILURE_SHIFT = 57, /* 1 bit: reallocf, a failure frees the block */
	FP_COOKIE_HOLDS_CHUNK_SHIFT = 58, /* 1 bit: ptr_reg has the block's chunk, FP_CHUNK_HEADER before it */
	/* 1 bit. The probe is for a child of vfork, which runs in the target's memory until it calls exec. Kernels from 6.12 on run a probe only
	 * in the process for which it was attached (commit 900f362e2062, "bpf: Fix uprobe multi pid filter check"), not in all that share
	 * its memory. */
	FP_COOKIE_VFORK_SHIFT = 59,
	FP_COOKIE_COUNT_ALIGNS_SHIFT = 60, /* 1 bit: count_reg has the alignment in bytes */
	FP_COOKIE_STEPPED_SHIFT = 61, /* 1 bit: the kernel single-steps the instruction at the site, instead of emulating it */
	/* For a probe of the program's own (USDT), with the slot at the same position: 16 bits, the number of the row with the locations of the
	 * arguments. */
	FP_USDT_COOKIE_SITE_SHIFT = 16,
};
enum fp_no_register {
	FP_NO_REG = 0x1f,      /* in a cookie: all bits of the field */
	FP_USDT_NO_REG = 0xff, /* in a row: 0x1f is sp on arm64 */
};
#define FP_COOKIE_FIELD(c, shift, mask) ((unsigned int)(((c) >> (shift)) & (mask)))
#define FP_COOKIE_OP(c) FP_COOKIE_FIELD(c, FP_COOKIE_OP_SHIFT, 0xff)
#define FP_COOKIE_FUNCTION(c) FP_COOKIE_FIELD(c, FP_COOKIE_FUNCTION_SHIFT, 0xff)
#define FP_COOKIE_SIZE_REG(c) FP_COOKIE_FIELD(c, FP_COOKIE_SIZE_REG_SHIFT, FP_NO_REG)
#define FP_COOKIE_COUNT_REG(c) FP_COOKIE_FIELD(c, FP_COOKIE_COUNT_REG_SHIFT, FP_NO_REG)
#define FP_COOKIE_PTR_REG(c) FP_COOKIE_FIELD(c, FP_COOKIE_PTR_REG_SHIFT, FP_NO_REG)
#define FP_COOKIE_SLOT(c) FP_COOKIE_FIELD(c, FP_COOKIE_SLOT_SHIFT, 0xffff)
#define FP_COOKIE_SP_WORDS(c) FP_COOKIE_FIELD(c, FP_COOKIE_SP_WORDS_SHIFT, 0xff)
#define FP_COOKIE_MAY_THROW(c) FP_COOKIE_FIELD(c, FP_COOKIE_MAY_THROW_SHIFT, 1)
#define FP_COOKIE_FREES_ON_FAILURE(c) FP_COOKIE_FIELD(c, FP_COOKIE_FREES_ON_FAILURE_SHIFT, 1)
#define FP_COOKIE_HOLDS_CHUNK(c) FP_COOKIE_FIELD(c, FP_COOKIE_HOLDS_CHUNK_SHIFT, 1)
#define FP_COOKIE_COUNT_ALIGNS(c) FP_COOKIE_FIELD(c, FP_COOKIE_COUNT_ALIGNS_SHIFT, 1)
#define FP_COOKIE_STEPPED(c) FP_COOKIE_FIELD(c, FP_COOKIE_STEPPED_SHIFT, 1)
#define FP_COOKIE_VFORK(c) FP_COOKIE_FIELD(c, FP_COOKIE_VFORK_SHIFT, 1)
#define FP_USDT_COOKIE_SITE(c) FP_COOKIE_FIELD(c, FP_USDT_COOKIE_SITE_SHIFT, 0xffff)

/* The key of a probe on a kernel without attach cookies: its location and its set, since probes of both sets may be at one place. */
struct fp_site {
	unsigned int tgid;
	unsigned int large; /* 1 = of the set for large blocks */
	unsigned long long ip;
};

/* glibc's chunks (malloc/malloc.c, struct malloc_chunk; the same from 2.26 on): two words before the block, the second of which is the
 * chunk's size with three flags. The thread cache takes chunks of up to 1040 bytes (tcache_max_bytes = 1032, and a word). */
#define FP_CHUNK_HEADER 16
#define FP_CHUNK_FLAGS 7ULL
#define FP_CHUNK_MMAPPED 2ULL
#define FP_CHUNK_CACHED_MAX 1040ULL
/* A call that requests this much may get a chunk that is not cached: glibc leaves a remainder below 32 bytes with the chunk, memalign one
 * on each side. */
#define FP_LARGE_REQUEST_MIN (1032ULL - 64)

/* A return probe swaps the return address on the stack, and a C++ exception that passes through such a frame finds no way out: the
 * process ends where it would have caught std::bad_alloc. So the return of an operator new that requests this much or more, the only
 * kind that fails on an ordinary machine, is not probed, and where memory is limited (FP_TARGET_LIMITED) none is; the call is counted
 * (FP_CNT_NOT_FOLLOWED). Only a session can leave out the return of one call: elsewhere throwing functions are not probed at all unless
 * that is requested (src/session/throwing.rs). */
#define FP_THROW_BYTES (1ULL << 30)

/* Probes in the programs themselves (USDT): alloc(pointer, bytes, weight), with fragprof's own sampler also the interval; free has only
 * the first argument. */
#define FP_USDT_ARGUMENTS 4

enum fp_usdt_kind {
	FP_USDT_CONSTANT = 1, /* value */
	FP_USDT_REGISTER = 2, /* base, shifted right by shift */
	FP_USDT_MEMORY = 3,   /* at value + base + (index << shift) */
};

/* Where an argument is. 16 bytes. */
struct fp_usdt_argument {
	long long value;         /* the constant, or the displacement */
	unsigned char kind;      /* enum fp_usdt_kind */
	unsigned char bytes;     /* 1, 2, 4 or 8 */
	unsigned char is_signed; /* extended by its sign */
	unsigned char base;      /* DWARF register, FP_USDT_NO_REG = none */
	unsigned char index;     /* likewise */
	unsigned char shift;     /* bits: 0 to 3 for an index, 0 or 8 for a register */
	unsigned char pad[2];
};

struct fp_usdt_site {
	struct fp_usdt_argument arguments[FP_USDT_ARGUMENTS];
};

#endif
