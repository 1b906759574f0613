//! `.eh_frame` to rows to blocks: the tables of the BPF unwinder. Pure functions, no root.
//!
//! ```text
//! elf (finds the sections) ──→ rows (gimli's rows, as rules) ──→ table (blocks of 256 bytes) ──→ sink
//!                                                    mappings (of a process) ──→ blocks ──┘
//! budget decides which tables stay
//! ```
//!
//! The blocks are made of the types in [`crate::bpf`]. Everything read here comes from files and memory that others control: all of it is bounded,
//! nothing panics, and what is refused is counted ([`rows::Counts`]).

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
        /// Which part of the file.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
    /// Not a 64-bit little-endian ELF file of a known machine.
    #[error("not an ELF file for x86-64 or arm64")]
    NotElf,
    /// For another machine.
    #[error("the file is for another machine")]
    OtherMachine,
    /// A header names a place outside the file, or more than the limit.
    #[error("the ELF headers are corrupt: {what}")]
    Corrupt {
        /// Which.
        what: &'static str,
    },
    /// There is neither `.eh_frame` nor `.debug_frame`.
    #[error("the file has no unwind information (.eh_frame or .debug_frame)")]
    NoUnwindInformation,
    /// The file needs more than one file may.
    #[error("the file has more {what} than the limit of {limit}")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}
