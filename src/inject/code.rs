//! Code of a process: the trampoline of its signal handlers, and addresses of functions in its files.

use std::collections::HashSet;

use super::machine::TRAMPOLINES;
use super::memory;
use super::refusal::Refusal;
use crate::process::maps::{Backing, Mapping, Maps};
use crate::process::{MappedFile, Process};
use crate::units::Addr;

/// Bytes of code searched in a file, and at a time.
const CODE_BYTES_MAX: u64 = 64 << 20;
const CODE_BYTES_AT_ONCE: u64 = 1 << 20;
/// Bytes of the kernel's own object: a few pages.
const VDSO_BYTES_MAX: u64 = 1 << 20;

/// The address in a process of a virtual address in a file; `None` if no executable mapping of that file has it.
#[must_use]
pub fn address_of(maps: &Maps, mapping: &Mapping, file: &MappedFile, vaddr: u64) -> Option<u64> {
    let address = file.elf.load_bias(mapping.start.0, mapping.offset)?.wrapping_add(vaddr);
    let own = |other: &&Mapping| other.inode == mapping.inode && other.device == mapping.device;
    maps.executable_files().filter(own).any(|other| other.contains(Addr(address))).then_some(address)
}

/// The virtual address of a function in a file.
#[must_use]
pub fn function_vaddr(file: &MappedFile, name: &[u8]) -> Option<u64> {
    let mut found = None;
    file.elf.for_each_function(|function| {
        if found.is_none() && function.name == name {
            found = Some(function.vaddr);
        }
    });
    found
}

/// Finds the instructions that return from a signal handler: in the kernel's own object, in the C library if there is one, otherwise in any
/// file. They are compared with what is in memory, so that a replaced file does no harm.
///
/// # Errors
/// If there are none.
pub fn trampoline(process: &Process, maps: &Maps) -> Result<u64, Refusal> {
    let pid = process.pid().0.cast_signed();
    if let Some(address) = trampoline_of_kernel(pid, maps) {
        return Ok(address);
    }
    let mut seen = HashSet::new();
    let mut files: Vec<&Mapping> = maps.executable_files().filter(|mapping| seen.insert((mapping.device, mapping.inode))).collect();
    let is_c_library = |mapping: &Mapping| {
        let name = mapping.file_name();
        name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl")
    };
    files.sort_by_key(|mapping| !is_c_library(mapping));
    let is_there = |address: u64, code: &[u8]| {
        let mut found = [0; 16];
        found.get_mut(..code.len()).is_some_and(|part| memory::read(pid, address, part) == code.len() && part == code)
    };
    for mapping in files {
        let Ok(file) = MappedFile::open(process, mapping) else { continue };
        for (vaddr, code) in trampolines_in(&file) {
            if let Some(address) = address_of(maps, mapping, &file, vaddr)
                && is_there(address, code)
            {
                return Ok(address);
            }
        }
    }
    Err(Refusal::TrampolineMissing)
}

/// Those of the kernel's own object, which each process has (arm64).
fn trampoline_of_kernel(pid: i32, maps: &Maps) -> Option<u64> {
    let own = maps.mappings.iter().find(|mapping| matches!(&mapping.backing, Backing::Named(name) if name == "[vdso]"))?;
    let mut code = vec![0; own.end.0.checked_sub(own.start.0).filter(|&bytes| bytes <= VDSO_BYTES_MAX)? as usize];
    let read = memory::read(pid, own.start.0, &mut code);
    code.truncate(read);
    TRAMPOLINES.iter().find_map(|trampoline| {
        let at = code.windows(trampoline.len()).position(|window| window == *trampoline)?;
        Some(own.start.0 + at as u64)
    })
}

/// Virtual addresses of such instructions in a file's code.
fn trampolines_in(file: &MappedFile) -> Vec<(u64, &'static [u8])> {
    let mut found = Vec::new();
    for segment in file.elf.segments().iter().filter(|segment| segment.executable) {
        let end = segment.vaddr.saturating_add(segment.file_bytes.min(CODE_BYTES_MAX));
        let mut at = segment.vaddr;
        while at < end && found.is_empty() {
            // Consecutive parts overlap by what could lie across their border.
            let bytes = file.elf.bytes_at(at, (end - at).min(CODE_BYTES_AT_ONCE + 16));
            for &code in TRAMPOLINES {
                found.extend(bytes.windows(code.len()).position(|window| window == code).map(|offset| (at + offset as u64, code)));
            }
            at = at.saturating_add(CODE_BYTES_AT_ONCE);
        }
    }
    found
}
