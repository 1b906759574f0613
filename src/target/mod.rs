//! Which process: identity, mappings, mapped files and build ids, allocator detection.
//!
//! ```text
//! Process ──→ maps ──→ file (attach path, identity) ──→ elf (segments, symbols) ──→ allocator (who serves malloc here)
//! ```
//!
//! Every path goes through `/proc/PID/map_files` or `/proc/PID/root`, so that containers, deleted and overlay files work.

pub mod allocator;
pub mod elf;
pub mod file;
pub mod maps;
pub mod process;

pub use allocator::{Allocator, AllocatorModule, EntryPoint};
pub use file::{FileIdentity, MappedFile};
pub use maps::{Backing, Mapping, Maps};
pub use process::{Process, ProcessId, TargetError};
