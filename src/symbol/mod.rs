//! Addresses to frames: function, file, line and module, with inlined functions.
//!
//! ```text
//! process ─ snapshot::Snapshots ─→ space::AddressSpace
//! frame word ─ space::AddressSpace ─→ (module, address in its file) ─ elf::ElfSymbols ─→ symbols ─ demangle ─→ Frame
//!                    │                                                    └─ separate, debuginfod: its debug file
//!                    └─ generated code ─ perf_map::PerfMap ───────────────────────────────────────────────────┘
//! ```
//!
//! The data that look-ups need of a process (executable mappings, opened files, perf map) is collected in an [`AddressSpace`] while it runs, so
//! that its stacks can be named after it has ended. Look-ups are by address in the file, so a library that many processes map is read once.
//!
//! A [`Symbolizer`] belongs to one thread. Its caches have limits, in `resolver.rs` and `elf.rs`; beyond them entries are dropped and read again.

pub mod debuginfod;
mod demangle;
mod elf;
mod named;
mod perf_map;
mod resolver;
mod separate;
mod snapshot;
mod space;
pub mod variables;
mod vdso;

pub(crate) use demangle::demangle;
pub use named::{NAMED_MAX, NamedFrames};
pub use perf_map::{PERF_MAP_BYTES_MAX, PERF_MAP_ENTRIES_MAX, PerfMap};
pub use resolver::{Counters, Known, Symbolizer};
pub use separate::Separate;
pub use snapshot::{KEPT_FILES_MAX, Snapshots, has_perf_map, read_perf_map};
pub use space::{AddressSpace, Backing, Module, Region};

/// Longest name of a function or file, in bytes; longer ones are cut and end in `…`. C++ names of some hundred KiB exist.
pub const NAME_BYTES_MAX: usize = 2048;

/// Cuts a name at [`NAME_BYTES_MAX`].
pub(crate) fn capped(name: &str) -> std::borrow::Cow<'_, str> {
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
