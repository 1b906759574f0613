// SPDX-License-Identifier: (BSD-2-Clause OR GPL-2.0-only)
/*
 * Lists the types that the programs and the daemon share. Never loaded: build/bindings.rs generates Rust from this object's type
 * information (src/bpf.rs). The daemon knows only the types reachable from here.
 */
#include "vmlinux.h"

#include "fragprof.h"
#include "unwind_table.h"
#include "../src/replay/player.h"
#include "../src/sampler/preload/ring.h"

/* Structs that are copied from one side to the other. */
struct structs {
	struct fp_alloc alloc;
	struct fp_sample sample;
	struct fp_contents contents;
	struct fp_free free;
	struct fp_free_stack free_stack;
	struct fp_stack stack;
	struct fp_vm vm;
	struct fp_life life;
	struct fp_need_table need_table;
	struct fp_counters counters;
	struct fp_slots slots;
	struct fp_usdt_site usdt_site;
	struct fp_site site;
	struct fp_thread_registers thread_registers;
	struct fp_table_header table_header;
	struct fp_index index;
	struct fp_rows rows;
	struct fp_rule rule;
	struct fp_mappings_header mappings_header;
	struct fp_mapping mapping;
	struct fp_unwind_clock unwind_clock;
	struct fp_hotspot hotspot;
	struct fp_python python;
	struct fp_python_frame python_frame;
	struct fp_python_stack python_stack;
	struct fp_python_text python_text;
	struct fp_python_code python_code;
	struct fp_play play;
	struct fp_ring_event ring_event;
	struct fp_ring_stack ring_stack;
} structs;

/* Structs that both sides write while the daemon has them mapped: atomics in Rust. */
struct live {
	struct fp_target target;
	struct fp_player player;
	struct fp_ring ring;
	struct fp_ring_process ring_process;
	struct fp_ring_chunk ring_chunk;
} live;

/* Enums in Rust, without NONE, for which it has Option, and without MAX. */
struct choices {
	enum fp_record_kind record_kind;
	enum fp_unwind_end unwind_end;
	enum fp_vm_op vm_op;
	enum fp_counter counter;
	enum fp_op op;
	enum fp_usdt_kind usdt_kind;
	enum fp_cfa cfa;
	enum fp_saved_bp saved_bp;
	enum fp_saved_ra saved_ra;
	enum fp_mapping_kind mapping_kind;
	enum fp_frame_kind frame_kind;
	enum fp_python_shape python_shape;
	enum fp_python_end python_end;
	enum fp_play_op play_op;
	enum fp_ring_kind ring_kind;
	enum fp_ring_origin ring_origin;
} choices;

/* Constants in Rust. */
struct numbers {
	enum fp_limit limit;
	enum fp_stamp stamp;
	enum fp_words words;
	enum fp_alloc_bits alloc_bits;
	enum fp_frame_bits frame_bits;
	enum fp_target_flag target_flag;
	enum fp_cookie_shift cookie_shift;
	enum fp_no_register no_register;
	enum fp_table_layout table_layout;
	enum fp_rule_register rule_register;
	enum fp_hotspot_limit hotspot_limit;
	enum fp_python_limit python_limit;
	enum fp_python_frame_flag python_frame_flag;
	enum fp_python_wire python_wire;
	enum fp_player_limit player_limit;
	enum fp_ring_limit ring_limit;
	enum fp_ring_flag ring_flag;
	enum fp_ring_process_state ring_process_state;
	enum fp_ring_chunk_state ring_chunk_state;
} numbers;
