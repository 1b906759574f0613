//! Code of a process: the trampoline of its signal handlers, and addresses of functions in its files.

use std::collections::HashSet;

use super::memory;
use super::refusal::Refusal;
use crate::process::maps::{Mapping, Maps};
use crate::process::{MappedFile, Process};
use crate::units::Addr;

/// `mov $15, %rax; syscall` as glibc has it, and with a 32-bit register as musl and others do: the call of `rt_sigreturn`.
const TRAMPOLINES: [&[u8]; 2] = [&[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05], &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]];
/// Bytes of code searched in a file, and at a time.
const CODE_BYTES_MAX: u64 = 64 << 20;
const CODE_BYTES_AT_ONCE: u64 = 1 << 20;

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

/// Finds the instructions that return from a signal handler: in the C library if there is one, otherwise in any file. They are compared
/// with what is in memory, so that a replaced file does no harm.
///
/// # Errors
/// If there are none.
pub fn trampoline(process: &Process, maps: &Maps) -> Result<u64, Refusal> {
    let mut seen = HashSet::new();
    let mut files: Vec<&Mapping> = maps.executable_files().filter(|mapping| seen.insert((mapping.device, mapping.inode))).collect();
    let is_c_library = |mapping: &Mapping| {
        let name = mapping.file_name();
        name.starts_with("libc.") || name.starts_with("libc-") || name.starts_with("ld-musl")
    };
    files.sort_by_key(|mapping| !is_c_library(mapping));
    let pid = process.pid().0.cast_signed();
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

/// Virtual addresses of such instructions in a file's code.
fn trampolines_in(file: &MappedFile) -> Vec<(u64, &'static [u8])> {
    let mut found = Vec::new();
    for segment in file.elf.segments().iter().filter(|segment| segment.executable) {
        let end = segment.vaddr.saturating_add(segment.file_bytes.min(CODE_BYTES_MAX));
        let mut at = segment.vaddr;
        while at < end && found.is_empty() {
            // Consecutive parts overlap by what could lie across their border.
            let bytes = file.elf.bytes_at(at, (end - at).min(CODE_BYTES_AT_ONCE + 16));
            for code in TRAMPOLINES {
                found.extend(bytes.windows(code.len()).position(|window| window == code).map(|offset| (at + offset as u64, code)));
            }
            at = at.saturating_add(CODE_BYTES_AT_ONCE);
        }
    }
    found
}
