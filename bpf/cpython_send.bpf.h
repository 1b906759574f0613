/* SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only) */
/*
 * From the Python frames of a stack to the reader: the frames, and before them what each of their code objects says, unless the target's
 * reader knows that. The code object runs, so that it is there, while the daemon may find it freed.
 */
#ifndef FRAGPROF_CPYTHON_SEND_BPF_H
#define FRAGPROF_CPYTHON_SEND_BPF_H

#include "cpython.bpf.h"
#include "maps.bpf.h"

_Static_assert(sizeof(struct fp_python_walk) <= 8192 - 128, "a thread's Python frames do not fit into task storage");

/* The state of each thread of a process with CPython; as `threads`. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_python_walk);
} python_threads SEC(".maps");

/* A definition that is being sent. Apart from the frames, because of the limit of 8 KiB. */
struct fp_python_sending {
	struct fp_python_code definition;
	__u8 lines[FP_PYTHON_LINES_BYTES];
};

struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct fp_python_sending);
} python_sending SEC(".maps");

struct fp_python_code_key {
	__u64 target; /* generation and slot */
	__u64 code;
};

/* What each code object's last definition said, for each target. An evicted entry costs a second definition, which replaces the first by
 * the same. 16 Ki functions x ~80 B = 1.3 MiB. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct fp_python_code_key);
	__type(value, __u64);
} python_codes_sent SEC(".maps");

/* Adds the Python frames of the current thread to its walk. Not 0: they could not be read, or not all of them. */
__noinline int fp_python_take(struct fp_walk *walk)
{
	struct fp_python_walk *python;
	struct fp_python *layout;
	__u32 key;
	void *table;

	if (!walk)
		return 0;
	python = bpf_task_storage_get(&python_threads, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!python)
		return 1;
	if (python->generation != walk->generation || python->mm_id != walk->mm_id) {
		key = walk->mm_id;
		table = bpf_map_lookup_elem(&mapping_tables, &key);
		key = walk->python;
		layout = table ? bpf_map_lookup_elem(table, &key) : NULL;
		if (!layout)
			return 1;
		python->layout = *layout;
		python->generation = walk->generation;
		if (python->mm_id != walk->mm_id)
			python->found = 0;
		/* Nothing is remembered. */
		python->is_alone = 0;
		python->walks += 1;
		python->mm_id = walk->mm_id;
	}
	fp_python_add(walk, python, FP_THREAD_POINTER(bpf_get_current_task_btf()));
	return python->end >= FP_PYTHON_END_UNREADABLE;
}

/* Reads a text into a buffer of `most` bytes. */
static __always_inline void fp_read_text(const struct fp_python *layout, __u64 object, struct fp_python_text *text, __u8 *out, __u32 most)
{
	__u64 bytes, begin = layout->text_ascii;
	__u32 kind, size;

	text->object = object;
	text->length = fp_user_word(object + layout->text_length);
	text->state = fp_user_word(object + layout->text_state) >> layout->text_kind_shift & 31;
	text->bytes = 0;
	kind = text->state & 7;
	if (!(text->state & 16))
		begin = layout->text_compact;
	bytes = text->length;
	if (bytes > most)
		bytes = most;
	bytes *= kind;
	size = bytes > most ? most : bytes;
	barrier_var(size);
	size &= 2 * most - 1;
	if (size <= most && !bpf_probe_read_user(out, size, (void *)(object + begin)))
		text->bytes = size;
}

struct fp_python_definer {
	struct fp_python_walk *python;
	struct fp_python_sending *sending;
	struct fp_target *target;
	void *ring;
	__u32 slot;
	__u32 failed;
};

/* Sends one part of a code object's definition. */
static long fp_python_send_part(__u32 i, struct fp_python_definer *definer)
{
	struct fp_python_walk *python = definer->python;
	struct fp_python_code *definition = &definer->sending->definition;
	__u64 at = definition->lines_at, rest = definition->lines.length - at;
	__u32 size = rest > FP_PYTHON_LINES_BYTES ? FP_PYTHON_LINES_BYTES : rest;

	barrier_var(size);
	size &= 2 * FP_PYTHON_LINES_BYTES - 1;
	if (size > FP_PYTHON_LINES_BYTES)
		return 1;
	if (bpf_probe_read_user(definer->sending->lines, size, (void *)(definition->lines.object + python->layout.bytes_data + at)))
		size = 0;
	definition->lines.bytes = size;
	fp_fill_head(&definition->head, definer->target, definer->slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_PYTHON_CODE, 0);
	if (bpf_ringbuf_output(definer->ring, definition, sizeof(*definition) + size, BPF_RB_NO_WAKEUP)) {
		definer->failed = 1;
		return 1;
	}
	definition->lines_at = at + size;
	return !size || definition->lines_at >= definition->lines.length;
}

/* Defines the code object of one frame. */
static long fp_python_define_code(__u32 i, struct fp_python_definer *definer)
{
	struct fp_python_walk *python = definer->python;
	struct fp_python_code *definition = &definer->sending->definition;
	const struct fp_python *layout = &python->layout;
	struct fp_python_code_key key = { .target = (__u64)definer->target->generation << 32 | definer->slot };
	__u64 identity, *known;

	if (i >= python->len || i >= FP_PYTHON_FRAMES_MAX)
		return 1;
	if (python->frames[i].flags & FP_PYTHON_UNREADABLE)
		return 0;
	key.code = python->frames[i].code;
	identity = fp_read_code(python, key.code);
	if (!identity)
		return 0;
	known = bpf_map_lookup_elem(&python_codes_sent, &key);
	if (known && *known == identity)
		return 0;
	definition->code = key.code;
	definition->first_line = fp_code_number(python, layout->code_first_line);
	definition->version = fp_code_number(python, layout->code_version);
	fp_read_text(layout, fp_code_word(python, layout->code_name), &definition->name, definition->name_bytes, FP_PYTHON_NAME_BYTES);
	fp_read_text(layout, fp_code_word(python, layout->code_file), &definition->file, definition->file_bytes, FP_PYTHON_FILE_BYTES);
	definition->lines.object = fp_code_word(python, layout->code_lines);
	definition->lines.length = fp_user_word(definition->lines.object + layout->bytes_length);
	definition->lines.state = 0;
	definition->lines_at = 0;
	bpf_loop(FP_PYTHON_LINES_MAX / FP_PYTHON_LINES_BYTES, fp_python_send_part, definer, 0);
	if (definer->failed)
		return 1;
	bpf_map_update_elem(&python_codes_sent, &key, &identity, BPF_ANY);
	return 0;
}

/* Sends the Python frames of the current thread's walk. False if the ring is full. */
static __always_inline bool fp_python_send(struct fp_walk *walk, struct fp_target *target, __u32 slot, void *ring)
{
	struct fp_python_definer definer = { .target = target, .ring = ring, .slot = slot };
	struct fp_python_walk *python;
	__u32 len;

	python = bpf_task_storage_get(&python_threads, bpf_get_current_task_btf(), NULL, 0);
	if (!python || python->hash != walk->hash)
		return true;
	if (!python->len && !python->end)
		return true;
	definer.python = python;
	definer.sending = bpf_task_storage_get(&python_sending, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);
	if (!definer.sending)
		return false;
	bpf_loop(FP_PYTHON_FRAMES_MAX, fp_python_define_code, &definer, 0);
	if (definer.failed)
		return false;
	fp_fill_head(&python->record.head, target, slot, (__u32)bpf_get_current_pid_tgid(), FP_REC_PYTHON_STACK, 0);
	python->record.hash = walk->hash;
	python->record.len = python->len;
	python->record.end = python->end;
	len = python->len;
	if (len > FP_PYTHON_FRAMES_MAX)
		len = FP_PYTHON_FRAMES_MAX;
	barrier_var(len);
	len &= 255;
	return !bpf_ringbuf_output(ring, &python->record, sizeof(python->record) + len * sizeof(struct fp_python_frame), BPF_RB_NO_WAKEUP);
}

#endif
