// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * The unwinder on the host: unwind.bpf.h unchanged, with the kernel's helpers replaced by functions over recorded memory and tables.
 * Compiled to a shared object by the tests, which load it.
 */
#include <linux/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#define FP_HOST
#define SEC(name)
#undef __always_inline
#define __always_inline inline __attribute__((always_inline))
#define __noinline __attribute__((noinline))
#define barrier_var(var) asm volatile("" : "+r"(var))

#include "../../bpf/fragprof.h"
#include "../../bpf/machine.bpf.h"
#include "../../bpf/unwind_table.h"

struct host_region {
	__u64 begin;
	__u64 length;
	const __u8 *bytes;
};

struct host_blocks {
	const struct fp_block *blocks;
	__u64 length;
};

/* The input of a walk. */
struct host_world {
	const struct host_region *regions;
	__u64 region_count;
	const struct host_blocks *tables;
	__u64 table_count;
	struct host_blocks mappings;
	__u32 generation;
};

static __thread const struct host_world *world;
static int tables, mapping_tables, unwind_clock;

static void *bpf_map_lookup_elem(void *map, const void *key)
{
	static __thread struct fp_unwind_clock clock;
	__u32 at = *(const __u32 *)key;
	const struct host_blocks *blocks = map;

	if (map == &unwind_clock) {
		clock.generation = world->generation;
		return &clock;
	}
	if (map == &mapping_tables)
		return (void *)&world->mappings;
	if (map == &tables)
		return at < world->table_count && world->tables[at].length ? (void *)&world->tables[at] : NULL;
	return at < blocks->length ? (void *)&blocks->blocks[at] : NULL;
}

static long bpf_probe_read_user(void *out, __u32 size, const void *from)
{
	__u64 address = (__u64)from, i;

	for (i = 0; i < world->region_count; i++) {
		const struct host_region *region = &world->regions[i];
		__u64 distance = address - region->begin;

		if (address >= region->begin && distance < region->length && size <= region->length - distance) {
			memcpy(out, region->bytes + distance, size);
			return 0;
		}
	}
	return -14;
}

static long bpf_probe_read_kernel(void *out, __u32 size, const void *from)
{
	memcpy(out, from, size);
	return 0;
}

#define BPF_LOCAL_STORAGE_GET_F_CREATE 1
static void *bpf_get_current_task_btf(void)
{
	return NULL;
}

static long bpf_loop_host(__u32 count, long (*step)(__u32, void *), void *context)
{
	__u32 i;

	for (i = 0; i < count; i++)
		if (step(i, context))
			return i + 1;
	return i;
}
#define bpf_loop(count, step, context, flags) bpf_loop_host(count, (long (*)(__u32, void *))(step), context)

static __u64 bpf_ktime_get_ns(void)
{
	return 1000000000;
}

static struct fp_counters *fp_counters_of(__u32 shard)
{
	return NULL;
}

/* There are no probes in recordings. */
static __u64 fp_resolve_trampoline(__u64 pc, __u64 slot)
{
	return 0;
}

#include "../../bpf/cpython.bpf.h"
#include "../../bpf/unwind.bpf.h"

/* Bytes of a thread's state, to be zeroed by the caller. */
__u64 host_state_bytes(void)
{
	return sizeof(struct fp_walk);
}

struct host_stack {
	__u64 hash;
	__u64 need_pc;
	__u32 len;
	__u32 end;
	__u32 repeated;
	__u32 pad;
	__u64 frames[FP_FRAMES_MAX];
};

void host_unwind(const struct host_world *seen, void *state, struct pt_regs *regs, struct host_stack *out)
{
	struct fp_walk *walk = state;

	world = seen;
	/* A thread that has walked nothing is one of another process. */
	if (!walk->mm_id)
		memset(code_places_of_host, 0, sizeof(code_places_of_host));
	unwind_into(walk, regs, 1, 0);
	out->hash = walk->hash;
	out->need_pc = walk->need_pc;
	out->len = walk->len;
	out->end = walk->end;
	out->repeated = walk->repeated;
	memcpy(out->frames, fp_word_at(walk, walk->now, 0), sizeof(out->frames));
}

__u64 host_python_bytes(void)
{
	return sizeof(struct fp_python_walk);
}

struct host_python {
	__u64 hash;
	__u32 len;
	__u32 end;
	struct fp_python_frame frames[FP_PYTHON_FRAMES_MAX];
};

/* The Python frames of the thread that was walked last, whose own pointer is self. */
void host_python(const struct host_world *seen, void *state, void *python_state, __u64 self, struct host_python *out)
{
	struct fp_python_walk *python = python_state;
	struct fp_walk *walk = state;

	world = seen;
	python->layout = *(const struct fp_python *)&world->mappings.blocks[walk->python];
	fp_python_add(walk, python, self);
	out->hash = walk->hash;
	out->len = python->len;
	out->end = python->end;
	memcpy(out->frames, python->frames, sizeof(out->frames));
}
