/* SPDX-License-Identifier: (MIT OR Apache-2.0) */
/*
 * What fragprof and its player share: a ring of calls, and figures in the page before it. The player is a process that makes the recorded
 * calls of a trace; the Rust side is generated (bpf/shared.bpf.c).
 *
 * The file that both have mapped: struct fp_player in the first page, FP_PLAYER_SAMPLES_MAX samples in the next ones, then the ring.
 */
#ifndef FRAGPROF_PLAYER_H
#define FRAGPROF_PLAYER_H

enum fp_player_limit {
	/* Calls in the ring, 2.5 MiB: about 5 ms of them, so that neither side waits for the other often. A power of two. */
	FP_PLAYER_RING = 1 << 16,
	/* Samples of a replay, 32 KiB. */
	FP_PLAYER_SAMPLES_MAX = 4096,
	/* Bytes in front of the samples. */
	FP_PLAYER_HEAD_BYTES = 4096,
	/* Threads at a time: each has a stack of 128 KiB, of which it touches 8 KiB. */
	FP_PLAYER_THREADS_MAX = 16384,
	/* Descriptor of the shared file in the player. */
	FP_PLAYER_FD = 3,
	/* One in so many calls is timed. */
	FP_PLAYER_TIMED = 16,
};

enum fp_play_op {
	FP_PLAY_ALLOC = 1,      /* malloc, or posix_memalign */
	FP_PLAY_ZEROED = 2,     /* calloc */
	FP_PLAY_REALLOC = 3,
	FP_PLAY_FREE = 4,
	FP_PLAY_THREAD_END = 5, /* the thread returns from its function */
	FP_PLAY_SAMPLE = 6,     /* store the anonymous memory; block = index of the sample */
	FP_PLAY_PAUSE = 7,      /* raise fp_player.paused, and wait until resumed has its value */
	FP_PLAY_END = 8,        /* end the process */
};

/* A call. 40 bytes. */
struct fp_play {
	unsigned long long bytes;      /* requested */
	unsigned long long touch_from; /* the program writes to the block from here ... */
	unsigned long long touch_to;   /* ... to here */
	unsigned int block;            /* index in the player's table */
	unsigned int thread;           /* number of the thread that calls, 0 = the player's first */
	unsigned int ticks;            /* since the call before, 10 us each */
	unsigned char op;              /* enum fp_play_op */
	unsigned char alignment_bits;  /* log2; 0 = the allocator's own */
	unsigned char pad[2];
};

/* Both sides write. */
struct fp_player {
	unsigned int head;            /* calls written */
	unsigned int tail;            /* calls made */
	unsigned int player_waits;    /* for head to change */
	unsigned int writer_waits;    /* for tail to change */
	unsigned int paused;          /* pauses reached */
	unsigned int resumed;         /* pauses that are over */
	unsigned int blocks_max;      /* entries of the player's table of blocks, set before the player starts */
	unsigned int threads_max;     /* likewise of threads */
	unsigned int has_started;     /* 1 once the player's own memory is set up */
	unsigned int thread_failures; /* threads that could not be created: their calls are made by the first */
	unsigned long long calls;
	unsigned long long failures;    /* calls that returned no block */
	unsigned long long timed_calls; /* one in FP_PLAYER_TIMED */
	unsigned long long timed_ns;    /* that they took */
	unsigned long long peak_pages;  /* largest sample */
	unsigned long long blocks_at;   /* address of the player's table of blocks in its memory */
};

#endif
