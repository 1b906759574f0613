/* The memory that a recorder and the processes that record into it share.
 *
 * Included by the library and, through bpf/shared.bpf.c, by the daemon. Plain fixed-width types only, no implicit padding.
 *
 *   struct fp_ring                 one page
 *   struct fp_ring_process[]       one for each process image
 *   unsigned int[chunks]           the state of each chunk
 *   chunks                         FP_RING_CHUNK_BYTES each: struct fp_ring_chunk, then cells
 *
 * A thread claims a chunk, fills it alone, and says after each record how far it has come. The reader gives full chunks back. So the memory
 * has a limit whatever the number of threads, a thread waits for nobody, and whoever is killed leaves whole records.
 *
 * Each event has a ticket, drawn from a counter of its process: for a free before the block is given back, for an allocation after it was
 * received. Tickets have no gaps, so the reader knows the order of all events, and whether one is missing. */
#ifndef FRAGPROF_RING_H
#define FRAGPROF_RING_H

enum fp_ring_limit {
	FP_RING_MAGIC = 0x31524746, /* "FGR1", little-endian */
	FP_RING_VERSION = 1,
	FP_RING_HEADER_BYTES = 4096,
	/* Process images at a time; the reader frees those that have ended. A build has some dozens. */
	FP_RING_PROCESSES = 256,
	/* 64 KiB: 2,046 events. Claiming one costs a microsecond, 0.5 ns for each event. */
	FP_RING_CHUNK_BYTES = 65536,
	/* 1 GiB. */
	FP_RING_CHUNKS_MAX = 16384,
	FP_RING_CELL_BYTES = 32,
	/* Bits of an event's head below the ticket. */
	FP_RING_TICKET_SHIFT = 8,
	/* Bits of an event's address; above it is log2 of the alignment, and FP_RING_ZEROED_BIT. */
	FP_RING_ADDRESS_BITS = 56,
	FP_RING_ZEROED_BIT = 62,
};

enum fp_ring_flag {
	FP_RING_STACKS = 1 << 0,      /* take stacks of allocations */
	FP_RING_FREE_STACKS = 1 << 1, /* take stacks of frees too */
};

/* Written by the reader, except for the bells. */
struct fp_ring {
	unsigned int magic;
	unsigned int version;
	unsigned int chunks;
	unsigned int flags;          /* FP_RING_* */
	unsigned int counter_shift;  /* events have the machine's counter (TSC, CNTVCT) shifted right by so many bits */
	unsigned int pad;
	unsigned long long alive_ns; /* CLOCK_MONOTONIC_COARSE when the reader last looked: if that is long ago, it has been killed */
	unsigned int closed;         /* 1 = nobody reads any more: claim nothing */
	unsigned int returned;       /* raised with each chunk that is given back */
	unsigned int bell;           /* futex, raised by processes that wait for the reader */
	unsigned int refused;        /* process images that found no free entry, raised by them */
};

/* The life of an entry for a process image. */
enum fp_ring_process_state {
	FP_RING_PROCESS_FREE = 0,
	FP_RING_PROCESS_CLAIMED = 1,   /* being filled in */
	FP_RING_PROCESS_ANNOUNCED = 2, /* waits for the reader, a moment */
	FP_RING_PROCESS_KNOWN = 3,     /* set by the reader */
};

/* How an image began. */
enum fp_ring_origin {
	FP_RING_ORIGIN_IMAGE = 1,        /* a program that was executed */
	FP_RING_ORIGIN_FORK = 2,         /* a child of fork; its parent sends FP_RING_FORK */
	FP_RING_ORIGIN_UNKNOWN_FORK = 3, /* a child that began in another way: its parent sends nothing */
	FP_RING_ORIGIN_ATTACHED = 4,     /* a process that ran before */
};

struct fp_ring_process {
	unsigned int state;      /* futex: enum fp_ring_process_state */
	unsigned int pid;
	unsigned int origin;     /* enum fp_ring_origin */
	unsigned int parent;     /* entry of the process that forked, plus 1 */
	unsigned int in_front;   /* 1 = calls of malloc reach the library, 2 = they do not, 0 = not known yet */
	unsigned int look;       /* raised when code was found that was not mapped before */
	unsigned int looked;     /* futex: the `look` to which the reader has answered */
	unsigned int pad;
	/* What was lost because no chunk was free, by kind. */
	unsigned long long lost_allocs;
	unsigned long long lost_frees;
	unsigned long long lost_stacks;
	unsigned long long lost_others;
	unsigned long long nested;  /* of these, by a signal handler that interrupted the library */
	unsigned long long early;   /* calls before the library was attached, not counted elsewhere */
	unsigned long long failed;  /* allocations that failed */
	unsigned long long spare[5];
};

/* The state of a chunk. From FP_RING_STATE_BITS on: the entry of the owner's process, plus 1. */
enum fp_ring_chunk_state {
	FP_RING_CHUNK_FREE = 0,
	FP_RING_CHUNK_CLAIMED = 1, /* its header is being written */
	FP_RING_CHUNK_OPEN = 2,
	FP_RING_CHUNK_FULL = 3,    /* its owner has left it */
	FP_RING_STATE_BITS = 8,
};

/* One cell. */
struct fp_ring_chunk {
	unsigned int tid;
	unsigned int cells; /* complete, without this one */
	unsigned long long serial; /* of the chunks that its process claimed */
	unsigned long long spare[2];
};

enum fp_ring_kind {
	FP_RING_ALLOC = 1,
	FP_RING_FREE = 2,
	FP_RING_REALLOC_FREE = 3, /* as FREE, by a realloc; undone by REALLOC_FAIL of the same thread */
	FP_RING_REALLOC_FAIL = 4,
	FP_RING_FORK = 5,         /* address: pid of the child */
	FP_RING_STACK = 6,        /* no event: struct fp_ring_stack */
};

/* One cell. */
struct fp_ring_event {
	unsigned long long head;    /* enum fp_ring_kind, and from FP_RING_TICKET_SHIFT on the ticket */
	unsigned long long address; /* complement of: the block; log2 of the alignment asked for; zeroed */
	unsigned long long size;    /* bytes requested */
	unsigned int when;          /* the machine's counter, shifted */
	unsigned int stack;         /* its number, 0 = none */
};

/* One cell, then the frames in as many as they need. */
struct fp_ring_stack {
	unsigned long long head;  /* FP_RING_STACK */
	unsigned int stack;       /* its number, from 1 */
	unsigned short len;       /* frames */
	unsigned char end;        /* enum fp_unwind_end */
	unsigned char pad;
	unsigned long long spare[2];
	unsigned long long frames[]; /* as in struct fp_stack */
};

#endif
