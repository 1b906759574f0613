/* The stack of the calling thread, by the program's unwind tables. */
#ifndef FRAGPROF_WALK_H
#define FRAGPROF_WALK_H

#include "platform.h"

#include "../../../bpf/fragprof.h"

/* A thread's stack memory that is known to be readable. Tables may be wrong, and a read beyond the stack must not end the program. */
struct readable {
	uintptr_t begin, end;
};

/* The registers of the function that called an exported one. Only there, and with frame pointers (-fno-omit-frame-pointer). */
struct caller {
	uintptr_t pc, sp, bp;
};
#define CALLER()                                                                                                      \
	((struct caller){ (uintptr_t)__builtin_return_address(0), (uintptr_t)__builtin_dwarf_cfa(),                   \
			  *(const uintptr_t *)__builtin_frame_address(0) })

/* A frame, and from where the step to its caller read: words above the caller's sp; 0 = nowhere. */
struct walk_frame {
	/* As sent: flags and pc. */
	uint64_t word;
	uintptr_t sp, bp;
	int16_t return_at, bp_at;
};

/* The frames of a thread's last walk, the outermost one first. If a new walk reaches a frame with the same registers, and the words that were
 * read from there on have not changed, the rest is the same. 2.5 KiB: it is in the thread's static storage, of which threads with small
 * stacks have little. Deeper stacks are walked anew each time. */
#define LAST_FRAMES_MAX 64
struct walk_last {
	uint32_t len;
	uint64_t epoch;
	struct walk_frame frames[LAST_FRAMES_MAX];
	/* Of the frames from the outermost one to each. */
	uint64_t hashes[LAST_FRAMES_MAX];
};

/* A stack. */
struct walk {
	uint64_t hash;
	uint32_t len;     /* of frames[] */
	uint32_t tail;    /* outer frames that are those of walk_last */
	uint8_t end;      /* enum fp_unwind_end */
	uintptr_t function; /* 0 = not known */
	bool is_new_code; /* code was found that was not mapped when the list of files was last read */
	struct walk_frame frames[FP_FRAMES_MAX];
};

/* Walks the stack from a caller on, without the library's own frames. `function` is the function that it called, the first frame; NULL = it
 * is not known. */
void walk_take(struct walk *walk, struct readable *readable, struct walk_last *last, const struct caller *caller, const void *function);
/* The words of all frames, the innermost first. Before the thread's next walk. */
uint32_t walk_words(const struct walk *walk, const struct walk_last *last, unsigned long long *words);

/* Code may have been unmapped: what is known of it is forgotten. */
void walk_forget(void);

#endif
