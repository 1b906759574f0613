//! Addresses to frames: function, file, line and module, with inlined functions.
//!
//! ```text
//! process ─ snapshot::Snapshots ─→ space::AddressSpace
//! frame word ─ space::AddressSpace ─→ (module, address in its file) ─ elf::ElfSymbols ─→ symbols ─ demangle ─→ Frame
//!                    └─ generated code ─ perf_map::PerfMap ───────────────────────────────────────────────────┘
//! ```
//!
//! What a lookup needs of a process (its executable mappings, opened files, perf map) is collected in an [`AddressSpace`] while it
//! lives, so that its stacks can still be named when it is gone. Files are looked up by address in the file, so a library that many
//! processes map is read once.
//!
//! A [`Symbolizer`] belongs to one thread. Its caches have limits, named in `resolver.rs` and `elf.rs`; beyond them it forgets and reads again.

mod demangle;
mod elf;
mod perf_map;
mod resolver;
mod snapshot;
mod space;
pub mod variables;
mod vdso;

pub(crate) use demangle::demangle;
pub use perf_map::{PERF_MAP_BYTES_MAX, PERF_MAP_ENTRIES_MAX, PerfMap};
pub use resolver::{Counters, Symbolizer};
pub use snapshot::{KEPT_FILES_MAX, Snapshots, read_perf_map};
pub use space::{AddressSpace, Backing, Module, Region};

/// The address in a frame word; the rest are flags. `FP_FRAME_ADDR_MASK` of bpf/fragprof.h.
pub const WORD_ADDRESS: u64 = (1 << 56) - 1;
/// Frame word flag: the address is the instruction itself, not a return address. `FP_FRAME_EXACT`.
pub const WORD_EXACT: u64 = 1 << 56;
/// Frame word flag: found by a guarded frame-pointer step. `FP_FRAME_GUESSED`.
pub const WORD_GUESSED: u64 = 1 << 57;
/// Frame word flag: in an anonymous executable region. `FP_FRAME_JIT`.
pub const WORD_JIT: u64 = 1 << 58;
/// Frame word flag: a signal trampoline, whose address is no return address. `FP_FRAME_SIGNAL`.
pub const WORD_SIGNAL: u64 = 1 << 59;

/// Longest name of a function or file that is kept, in bytes; longer ones are cut and end in `…`. C++ names of some hundred KiB exist,
/// and nobody reads past the first screen.
pub const NAME_BYTES_MAX: usize = 2048;

/// Cuts a name at [`NAME_BYTES_MAX`].
fn capped(name: &str) -> std::borrow::Cow<'_, str> {
    if name.len() <= NAME_BYTES_MAX {
        return name.into();
    }
    format!("{}…", prefix(name, NAME_BYTES_MAX)).into()
}

/// The longest start of a text that has at most `bytes_max` bytes and ends between two characters.
fn prefix(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    &text[..end]
}

#[cfg(test)]
mod tests;
