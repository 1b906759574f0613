/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * What the daemon writes and the unwinder reads: a file's unwind table, and a process's mapping table.
 *
 * Both are arrays of 256-byte blocks (four cache lines; the kernel rounds array values up to 8 bytes, so rows of 4 bytes must come in
 * blocks to cost 4 bytes). src/unwind/ builds them from the same types (src/bpf.rs).
 *
 * A file's table, all parts in one array, so that it appears and disappears as a whole:
 *
 *   block 0              struct fp_table_header
 *   index_block ...      struct fp_index: for each granule of 4 KiB of text, the number of its first row
 *   rules_block ...      struct fp_rules: the distinct rules
 *   rows_block ...       struct fp_rows: address and rule of each row, in order of address
 *
 * A row holds from its address to the next row's. Rule 0 says that nothing is known (a gap between functions). A granule without a row
 * of its own continues the row before it.
 *
 * A process's mapping table: block 0 is struct fp_mappings_header, then struct fp_mappings, sorted by address, then what is known of the
 * process's managed runtimes, a block each.
 */
#ifndef FRAGPROF_UNWIND_TABLE_H
#define FRAGPROF_UNWIND_TABLE_H

enum fp_table_layout {
	FP_BLOCK_BYTES = 256,

	/* Text covered by one index entry. 4 KiB hold ~70 rows in ordinary code: one or two blocks to search. */
	FP_GRANULE_SHIFT = 12,

	/* Granules of one index block. Its last entry repeats the next block's first, so that a granule's first row and the next granule's
	 * are always found in one block. */
	FP_INDEX_GRANULES = 63,

	FP_ROWS_PER_BLOCK = 64,
	FP_RULES_PER_BLOCK = 32,
	FP_MAPPINGS_PER_BLOCK = 8,

	/* Executable mappings of a process. A JVM or a browser has a few hundred; 8192 in blocks of 8 are found in 10 steps. */
	FP_MAPPINGS_MAX = 8192,

	/* Files with a table at a time: three times the ELF files of a whole distribution. */
	FP_FILES_MAX = 8192,
};

/* A granule has at most 4096 rows, one per byte, so 65 blocks at most: 7 steps find the block. */
#define FP_ROW_BLOCK_STEPS 7
#define FP_MAPPING_BLOCK_STEPS 10

struct fp_block {
	unsigned long long words[FP_BLOCK_BYTES / 8];
};

struct fp_table_header {
	unsigned int first_granule; /* of the file's text, in file addresses (p_vaddr) */
	unsigned int granules;
	unsigned int rules_block;
	unsigned int rows_block;
	unsigned int rows;
	unsigned int last_used;     /* daemon's clock tick at the last use; written by the unwinder, for eviction */
};

struct fp_index {
	unsigned int first_row[FP_INDEX_GRANULES + 1];
};

struct fp_rows {
	unsigned short pc[FP_ROWS_PER_BLOCK];   /* low 16 bits of the file address */
	unsigned short rule[FP_ROWS_PER_BLOCK];
};

/* How the caller's stack pointer (the canonical frame address, CFA) is found. */
enum fp_cfa {
	FP_CFA_NONE = 0,        /* nothing known */
	FP_CFA_REGISTER = 1,    /* reg + offset */
	FP_CFA_DEREF = 2,       /* *(reg + deref_offset) + deref_add */
	FP_CFA_DEREF_INDEX = 3, /* *(reg + 8 * reg2 + deref_offset) + deref_add */
	FP_CFA_PLT = 4,         /* rsp + 8, and 8 more from the offset'th byte of a 16-byte PLT entry on */
	FP_CFA_SIGNAL = 5,      /* a signal trampoline: the interrupted registers lie at rsp (struct ucontext) */
	FP_CFA_END = 6,         /* the outermost frame: its return address is undefined */
	FP_CFA_UNSUPPORTED = 7, /* a rule that has no form here */
};

/* Where the caller's frame pointer is (rbp, x29; "bp" everywhere). */
enum fp_saved_bp {
	FP_BP_SAME = 0,   /* still in bp */
	FP_BP_AT_CFA = 1, /* at CFA + 8 * bp_slot */
	FP_BP_AT_BP = 2,  /* at bp + 8 * bp_slot */
	FP_BP_AT_SP = 3,  /* at sp + 8 * bp_slot */
	FP_BP_LOST = 4,   /* undefined, or in a location that has no form here: steps that need it cannot be done */
};

/* Where the return address is. */
enum fp_saved_ra {
	FP_RA_AT_CFA = 0,      /* at CFA - 8; x86-64 alone */
	FP_RA_IN_REGISTER = 1, /* in reg2 (arm64: before it is saved; x86-64: glibc's vfork) */
	FP_RA_BESIDE_BP = 2,   /* in the word above the caller's bp; arm64 */
	FP_RA_AT_SLOT = 3,     /* at CFA + 8 * bp_slot, if bp is in no slot; arm64 */
	FP_RA_AT_REG = 4,      /* at reg + 8 * bp_slot, likewise, where the CFA is reg + offset; arm64 */
};

/* Codes of the frame pointer (rbp, x29) and of the stack pointer in rules; the others are in machine_*.bpf.h. */
enum fp_rule_register {
	FP_REG_BP = 6,
	FP_REG_SP = 7,
};

/* One rule, 8 bytes. Registers are codes (machine.bpf.h); others than bp and sp are known only where all registers are: in the first frame
 * and in one interrupted by a signal. */
struct fp_rule {
	unsigned char cfa;       /* enum fp_cfa */
	unsigned char registers; /* reg, reg2 << 4 */
	unsigned char saved;     /* enum fp_saved_bp, enum fp_saved_ra << 4 */
	signed char bp_slot;
	union {
		int offset;
		struct {
			short deref_offset;
			short deref_add;
		};
	};
};

struct fp_rules {
	struct fp_rule rule[FP_RULES_PER_BLOCK];
};

/* The kinds of mappings for the unwinder. */
enum fp_mapping_kind {
	FP_MAPPING_FILE = 1,   /* has a table, or will */
	FP_MAPPING_JIT = 2,    /* anonymous code: frame pointers */
	FP_MAPPING_NO_CFI = 3, /* a file without unwind information, or whose table was refused */
	FP_MAPPING_HOTSPOT = 4, /* a heap of a HotSpot JVM's code cache (struct fp_hotspot) */
};

struct fp_mapping {
	unsigned long long begin;
	unsigned long long end;
	unsigned long long bias; /* subtracted from an address gives the file's address (p_vaddr); HOTSPOT: the heap's segment map */
	unsigned int file;       /* index in the outer map of tables; HOTSPOT: block of struct fp_hotspot in this table */
	unsigned int kind;       /* enum fp_mapping_kind */
};

struct fp_mappings_header {
	unsigned int mappings;
	unsigned int python;        /* block of struct fp_python in this table; 0 = the process has no CPython */
	unsigned long long asked; /* when a table was last requested, CLOCK_MONOTONIC ns; written by the unwinder */
};

struct fp_mappings {
	struct fp_mapping mapping[FP_MAPPINGS_PER_BLOCK];
};

/* What is needed to walk the frames of a HotSpot JVM, read from the JVM's own description of its structures (src/managed/hotspot). The
 * at_* are offsets from the first byte of a code blob. */
struct fp_hotspot {
	unsigned long long code_begin;        /* of the code cache: frame words are relative to it */
	unsigned long long interpreter_begin;
	unsigned long long interpreter_end;
	unsigned long long name_nmethod;      /* addresses of the names that blobs of compiled methods have; 0 = not known yet */
	unsigned long long name_native;
	unsigned long long call_stub_return;  /* return address of methods that the JVM itself called */
	unsigned long long barrier_begin;     /* stubs of continuations: return address of a virtual thread's frame if its caller is in the
					       * Java heap; begin = end: there are none */
	unsigned long long barrier_end;
	unsigned int barrier_frame_bytes;     /* size of the frame that follows, Continuation.enterSpecial; 0 = not known yet */
	unsigned int segment_shift;           /* log2 of a segment's bytes */
	unsigned int block_bytes;             /* from the start of a block to its blob */
	unsigned int relative;                /* 1 = code bounds and handlers are 32-bit offsets from the blob, 0 = addresses */
	unsigned int at_name;
	unsigned int at_frame_size;
	unsigned int at_code_begin;
	unsigned int at_code_end;
	unsigned int at_method;               /* start of the fields below, which are read at once */
	unsigned int at_compile_id;           /* relative to at_method, as are those below */
	unsigned int at_original_pc;          /* field with the offset from sp, in bytes, of a deoptimised frame's pc */
	unsigned int at_deopt;
	unsigned int at_deopt_mh;             /* FP_HOTSPOT_NONE = there is none */
	unsigned int bytecode_below;          /* from an interpreted frame's bp down to the slot with the bytecode's address */
};

enum fp_hotspot_limit {
	/* Bytes read of a blob's header, and of the fields of a compiled method. */
	FP_HOTSPOT_HEAD_BYTES = 128,
	FP_HOTSPOT_METHOD_BYTES = 208,
	FP_HOTSPOT_NONE = 0xffff,
};

/* How a CPython keeps the frames of a thread, and how many of them belong to one call of the evaluation loop. */
enum fp_python_shape {
	FP_PYTHON_OBJECTS = 1,        /* 3.8, 3.9: a list of frame objects, one for each call */
	FP_PYTHON_OBJECTS_CFRAME = 2, /* 3.10: the same, and each call has a CFrame in its C frame */
	FP_PYTHON_ENTRIES = 3,        /* 3.11: a call's outermost frame is marked, and each call has a _PyCFrame in its C frame */
	FP_PYTHON_SHIMS = 4,          /* from 3.12 on: each call has a frame of its own in its C frame, outside of the others */
};

/* What is needed to read the frames of a CPython (src/managed/cpython/layout.rs has the sources). The other fields are offsets, in the
 * structure that their name begins with; FP_PYTHON_NONE = there is no such field. */
struct fp_python {
	unsigned long long interpreters;  /* address of the list of interpreters */
	unsigned long long eval_begin;    /* the evaluation loop's code */
	unsigned long long eval_end;
	unsigned long long cold_begin;    /* and the part of it that the compiler has put elsewhere; empty if there is none */
	unsigned long long cold_end;
	unsigned int shape;               /* enum fp_python_shape */
	unsigned int interpreter_next;
	unsigned int interpreter_threads;
	unsigned int thread_next;
	unsigned int thread_id;           /* what pthread_self returns */
	unsigned int thread_frame;        /* of the innermost frame */
	unsigned int thread_cframe;
	unsigned int cframe_frame;
	unsigned int cframe_previous;
	unsigned int frame_bytes;         /* of a frame's fields; FP_PYTHON_FRAME_BYTES at most */
	unsigned int frame_previous;
	unsigned int frame_code;
	unsigned int frame_instruction;   /* an index; from ENTRIES on an address */
	unsigned int frame_owner;
	unsigned int frame_entry;
	unsigned int owner_generator;     /* a frame of a generator may be seen before its first instruction */
	unsigned int owner_shim;          /* this owner and those above it */
	unsigned int code_bytes;          /* read of a code object; FP_PYTHON_CODE_BYTES at most */
	unsigned int code_file;
	unsigned int code_name;
	unsigned int code_lines;
	unsigned int code_first_line;
	unsigned int code_version;
	unsigned int code_first_traceable;
	unsigned int code_bytecode;
	unsigned int text_state;
	unsigned int text_length;
	unsigned int text_kind_shift;     /* in the state: kind, 3 bits; compact; ascii */
	unsigned int text_ascii;          /* characters of an ascii text */
	unsigned int text_compact;        /* of another text */
	unsigned int bytes_length;
	unsigned int bytes_data;
};

enum fp_python_limit {
	FP_PYTHON_THREAD_BYTES = 192,
	FP_PYTHON_FRAME_BYTES = 120,
	FP_PYTHON_CODE_BYTES = 248,
	FP_PYTHON_NONE = 0xffff,
};

/* State that the daemon updates while the unwinder runs. */
struct fp_unwind_clock {
	unsigned int generation; /* raised with each change of any table: earlier walks are then no longer valid */
	unsigned int tick;       /* seconds, for eviction by last use */
};

_Static_assert(sizeof(struct fp_block) == FP_BLOCK_BYTES, "fp_block");
_Static_assert(sizeof(struct fp_index) == FP_BLOCK_BYTES, "fp_index");
_Static_assert(sizeof(struct fp_rows) == FP_BLOCK_BYTES, "fp_rows");
_Static_assert(sizeof(struct fp_rules) == FP_BLOCK_BYTES, "fp_rules");
_Static_assert(sizeof(struct fp_mappings) == FP_BLOCK_BYTES, "fp_mappings");
_Static_assert(sizeof(struct fp_rule) == 8, "fp_rule");
_Static_assert(sizeof(struct fp_mapping) == 32, "fp_mapping");
_Static_assert(sizeof(struct fp_hotspot) <= FP_BLOCK_BYTES, "fp_hotspot");
_Static_assert(sizeof(struct fp_python) <= FP_BLOCK_BYTES, "fp_python");

#endif
