//! What a fetched file must be before anything reads symbols from it: a server's answer is untrusted.

use std::fs::File;

use thiserror::Error;

use crate::process::elf::{BuildId, Elf, ElfError};

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
    #[error("it has {bytes} bytes when its sections are decompressed, more than {bytes_max}")]
    TooLarge { bytes: u64, bytes_max: u64 },
}

/// Checks that a file has symbols, the build id that was asked for, and at most `bytes_max` bytes when its sections are decompressed: by their
/// own headers, for which the reader reserves memory.
pub(super) fn check(file: File, build_id: &BuildId, bytes_max: u64) -> Result<(), Unfit> {
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
    match elf.bytes_to_read() {
        bytes if bytes > bytes_max => Err(Unfit::TooLarge { bytes, bytes_max }),
        _ => Ok(()),
    }
}
