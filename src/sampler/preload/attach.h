/* Attaching to a program that runs already: the words through which its objects call the allocator.
 *
 * An object calls a function of another one through a word of its own, which the dynamic linker set (System V ABI, "Global Offset Table").
 * A word that holds the address of the allocator's function is given the address of this library's, and later back, each by one
 * compare-and-swap, so that a thread that calls at that moment calls the one or the other. Nothing else of the program is written; code is
 * not touched. The library passes every call on to the function that the word held, so it does not matter which words are swapped:
 *
 *   not swapped                               consequence
 *   a call without such a word (within the    the block is not sampled; a sampled one that is freed so is reported as live until its
 *     allocator, in a static program)         address is used again
 *   a copy of the address in the program's    the same
 *     own data
 *   an object that was loaded since           the same, until the next pass
 *
 * What is done is read from outside at the exported symbol fragprof_attached, and a tool that was killed in between leaves a program that
 * runs as before, some of its calls by way of this library. */
#ifndef FRAGPROF_ATTACH_H
#define FRAGPROF_ATTACH_H

#include "platform.h"

/* Words that can be swapped. Programs with 500 libraries have about 3,000. */
#define WORDS_MAX 16384u

/* Read from outside. Fields are only ever added. */
struct fragprof_attached {
	/* 0x31415046, "FPA1". */
	uint32_t magic;
	/* sizeof, so that a reader knows which fields there are. */
	uint32_t size_bytes;
	/* Words that hold this library's functions. */
	uint64_t words;
	/* Of them, those that the dynamic linker had not looked up yet (lazy binding). */
	uint64_t lazy;
	/* Words of the last pass that belong to another allocator, or to something in front of this one: left alone. */
	uint64_t foreign;
	/* Words of the last pass that could not be written, or for which there was no space. */
	uint64_t failed;
	/* Words that the last detaching put back. */
	uint64_t put_back;
	/* Passes and detachings that ended. */
	uint64_t passes;
	uint64_t detached;
	/* The process id while one of them runs, otherwise 0. */
	uint64_t runs;
	/* 1 if the process has no malloc that can be found by its name: nothing is done. */
	uint64_t without_malloc;
	/* The recorder's: descriptor of the memory that it shares with a reader, plus 1; 0 = none is open. */
	uint64_t memory_file;
	/* The recorder's: why the last pass did nothing (enum attached_refusal). */
	uint64_t refused;
};
extern struct fragprof_attached fragprof_attached;

enum attached_refusal {
	ATTACHED_NOT_REFUSED = 0,
	/* Another reader takes the events. */
	ATTACHED_HAS_READER = 1,
	/* The memory cannot be mapped, or its reader does not answer. */
	ATTACHED_NO_MEMORY = 2,
	/* The C library keeps a thread's number in another place. */
	ATTACHED_UNKNOWN_THREADS = 3,
};

/* What an attached library does, sampling (attached_sampler.c) or recording (attached_recorder.c). Before a pass, with the arguments of
 * fragprof_attach; `is_first`: no word leads to the library. */
enum attached_refusal attached_begin(const uint64_t arguments[3], bool is_first);
/* After a pass or a detaching: whether words lead to the library. */
void attached_in_front(bool in_front);

/* A function that can be called through a word: `ours` stands for `next`. */
typedef void attach_function(const char *name, const void *ours, const void *next);

/* Calls `each` for those of operators.c, strings.c and allocx.c that count. */
void operators_each(attach_function *each);
void strings_each(attach_function *each);
void allocx_each(attach_function *each);

#endif
