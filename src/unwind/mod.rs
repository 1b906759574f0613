//! `.eh_frame` to rows to blocks: the tables of the BPF unwinder. Pure functions, no root.
//!
//! ```text
//! elf (finds the sections) ──→ rows (gimli's rows, as rules) ──→ table (blocks of 256 bytes) ──→ sink
//!                                                    mappings (of a process) ──→ blocks ──┘
//! budget decides which tables stay loaded
//! ```
//!
//! The blocks consist of the types in [`crate::bpf`]. All input is from files and memory that others control: all of it is bounded, nothing
//! panics, and refused parts are counted ([`rows::Counts`]).

pub mod budget;
pub mod elf;
pub mod end;
pub mod expression;
pub mod layout;
pub mod mappings;
pub mod rows;
pub mod rule;
pub mod table;

pub use end::End;
pub use table::Table;

/// Why a file has no unwind table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Reading failed.
    #[error("cannot read {what}: {reason}")]
    Read {
        /// The part of the file.
        what: &'static str,
        /// The system's message.
        reason: String,
    },
    /// Not a 64-bit little-endian ELF file of a known machine.
    #[error("not an ELF file for x86-64 or arm64")]
    NotElf,
    /// The file is for another machine.
    #[error("the file is for another machine")]
    OtherMachine,
    /// A header refers to a part outside the file, or a number exceeds the limit.
    #[error("the ELF headers are corrupt: {what}")]
    Corrupt {
        /// The header.
        what: &'static str,
    },
    /// There is neither `.eh_frame` nor `.debug_frame`.
    #[error("the file has no unwind information (.eh_frame or .debug_frame)")]
    NoUnwindInformation,
    /// The file exceeds a limit.
    #[error("the file has more {what} than the limit of {limit}")]
    TooLarge {
        /// What is limited.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}
