//! Definitions shared by the BPF programs and the daemon: records, rows of maps, kinds, flags, counters and limits.
//!
//! Generated at the build (`build/bindings.rs`) from `bpf/fragprof.h`, `bpf/unwind_table.h` and `bpf/machine.bpf.h`, where each is
//! described; `bpf/shared.bpf.c` lists what is shared. Only the masks below are written by hand, from bit numbers.

include!(concat!(env!("OUT_DIR"), "/shared.rs"));

/// The address in a frame word; above it are flags.
pub const FRAME_ADDRESS_MASK: u64 = (1 << FRAME_ADDR_BITS) - 1;
/// Frame word flag: the address is the instruction itself, not a return address.
pub const FRAME_EXACT: u64 = 1 << FRAME_EXACT_BIT;
/// Frame word flag: found by a guarded frame-pointer step because there was no table entry.
pub const FRAME_GUESSED: u64 = 1 << FRAME_GUESSED_BIT;
/// Frame word flag: in generated code.
pub const FRAME_JIT: u64 = 1 << FRAME_JIT_BIT;
/// Frame word flag: a signal trampoline, whose address is not a return address.
pub const FRAME_SIGNAL: u64 = 1 << FRAME_SIGNAL_BIT;
