//! What a fetched file must be before anything reads symbols from it: a server's answer is untrusted.

use std::fs::File;

use thiserror::Error;

use crate::process::elf::{BuildId, Elf, ElfError};

/// Most bytes of a file's sections when they are decompressed, by their own headers: the reader reserves that much memory for them. DWARF
/// compresses to a third or a half, so that honest files of at most [`FILE_BYTES_MAX`](super::FILE_BYTES_MAX) stay below.
const DECOMPRESSED_BYTES_MAX: u64 = 1 << 30;

/// Why a file is not the debug file that was asked for.
#[derive(Debug, Error)]
pub(super) enum Unfit {
    /// Not an ELF file for this machine.
    #[error("{0}")]
    NotElf(#[from] ElfError),
    /// Of another program.
    #[error("its build id is {0}")]
    OtherBuildId(BuildId),
    /// Of none, or cut short.
    #[error("it has no build id")]
    NoBuildId,
    /// Nothing to look up in it, or cut short: section headers are at the end.
    #[error("it has neither a symbol table nor debug information")]
    NoSymbols,
    /// Its sections would take too much memory.
    #[error("its sections have {0} bytes when they are decompressed, more than {DECOMPRESSED_BYTES_MAX}")]
    TooLarge(u64),
}

/// Checks that a file has symbols, and the build id that was asked for.
pub(super) fn check(file: File, build_id: &BuildId) -> Result<(), Unfit> {
    let elf = Elf::parse(file)?;
    match elf.build_id_of_section().or_else(|| elf.build_id()) {
        Some(found) if found == *build_id => {}
        Some(found) => return Err(Unfit::OtherBuildId(found)),
        None => return Err(Unfit::NoBuildId),
    }
    let symbols: [&[u8]; 3] = [b".symtab", b".debug_info", b".zdebug_info"];
    if !symbols.into_iter().any(|section| elf.has_section(section)) {
        return Err(Unfit::NoSymbols);
    }
    match elf.decompressed_bytes() {
        bytes if bytes > DECOMPRESSED_BYTES_MAX => Err(Unfit::TooLarge(bytes)),
        _ => Ok(()),
    }
}
