//! Code whose locks an injected call needs: while a thread is in it, the call is not made there.

use std::ops::Range;

use super::{Forbidden, address_of};
use crate::allocator::Allocator;
use crate::allocator::detect::AllocatorModule;
use crate::process::elf::{Function, SymbolTable};
use crate::process::maps::{Mapping, Maps};
use crate::process::{MappedFile, Process};

/// An allocator's functions that lie further apart are not one piece of code.
const GAP_BYTES_MAX: u64 = 64 << 10;
/// Code around an allocator's named functions that may be its own too, where no other file's function ends it earlier.
const AROUND_BYTES: u64 = 32 << 10;
/// Names of functions that hold all locks of the allocator for a while (glibc, sysdeps/nptl/fork.h).
const FORK: [&[u8]; 4] = [b"fork", b"__libc_fork", b"__fork", b"_Fork"];

/// Functions of the C library that call the program's while they hold locks of the dynamic linker (glibc, elf/dl-iteratephdr.c, dl-open.c).
const LOADER: [&[u8]; 6] = [b"dl_iterate_phdr", b"__dl_iterate_phdr", b"dlopen", b"dlclose", b"dlmopen", b"__libc_dlopen_mode"];

/// The allocator's code. Of a library that is the allocator and nothing else: all of it.
#[must_use]
pub fn of_allocator(maps: &Maps, module: &AllocatorModule, allocator: Allocator) -> Vec<Forbidden> {
    let row = allocator.row();
    let what = format!("{}'s code", row.name);
    let is_own_library = !row.gives_way && row.libraries.iter().any(|library| module.file_name().starts_with(library));
    if is_own_library {
        let own = |mapping: &&Mapping| mapping.inode == module.mapping.inode && mapping.device == module.mapping.device;
        let code = maps.executable_files().filter(own);
        return code.map(|mapping| Forbidden { code: mapping.start.0..mapping.end.0, what: what.clone() }).collect();
    }
    let mut named: Vec<Range<u64>> = Vec::new();
    let mut others: Vec<Range<u64>> = Vec::new();
    let entry_points: Vec<u64> =
        module.found.functions.iter().filter(|function| function.allocator == allocator).map(|function| function.vaddr).collect();
    module.file.elf.for_each_function(|function| {
        let range = function.vaddr..function.vaddr.saturating_add(function.size.max(1));
        if entry_points.binary_search(&function.vaddr).is_ok() || is_named(&function, row.function_names) {
            named.push(range);
        } else if function.exported || function.table == SymbolTable::Dynamic {
            others.push(range);
        }
    });
    pieces(named, others, &entry_points)
        .into_iter()
        .filter_map(|piece| {
            let start = address_of(maps, &module.mapping, &module.file, piece.start)?;
            Some(Forbidden { code: start..start + (piece.end - piece.start), what: what.clone() })
        })
        .collect()
}

fn is_named(function: &Function<'_>, names: &[&str]) -> bool {
    std::str::from_utf8(function.name).is_ok_and(|name| names.iter().any(|part| name.contains(part)))
}

/// The pieces of code that an allocator's functions lie in: neighbours are joined, and each piece is extended to the next function that
/// other files can call and that is not the allocator's, because functions in between may be its own without a name. A single function that
/// is no entry point is not extended: it may be one of the program's whose name has such a part.
fn pieces(mut named: Vec<Range<u64>>, mut others: Vec<Range<u64>>, entry_points: &[u64]) -> Vec<Range<u64>> {
    named.sort_by_key(|range| range.start);
    others.sort_by_key(|range| range.start);
    let mut joined: Vec<(Range<u64>, bool)> = Vec::new();
    for range in named {
        match joined.last_mut() {
            Some((last, is_extended))
                if range.start <= last.end.saturating_add(GAP_BYTES_MAX) && !has_between(&others, last.end, range.start) =>
            {
                *is_extended |= range.start != last.start;
                last.end = last.end.max(range.end);
            }
            _ => {
                let is_entry_point = entry_points.contains(&range.start);
                joined.push((range, is_entry_point));
            }
        }
    }
    for (piece, _) in joined.iter_mut().filter(|(_, is_extended)| *is_extended) {
        let before = others.iter().filter(|other| other.end <= piece.start).map(|other| other.end).max().unwrap_or(0);
        let after = others.iter().filter(|other| other.start >= piece.end).map(|other| other.start).min().unwrap_or(u64::MAX);
        piece.start = before.max(piece.start.saturating_sub(AROUND_BYTES));
        piece.end = after.min(piece.end.saturating_add(AROUND_BYTES));
    }
    joined.into_iter().map(|(piece, _)| piece).collect()
}

fn has_between(others: &[Range<u64>], from: u64, to: u64) -> bool {
    others.iter().any(|other| from <= other.start && other.end <= to)
}

/// The C library's fork, which holds allocators' locks between its handlers.
#[must_use]
pub fn of_fork(process: &Process, maps: &Maps) -> Vec<Forbidden> {
    of_c_library(process, maps, &FORK, "fork")
}

/// The dynamic linker, and what holds its locks while it calls the program's functions.
#[must_use]
pub fn of_loader(process: &Process, maps: &Maps) -> Vec<Forbidden> {
    let is_loader = |mapping: &&Mapping| mapping.file_name().starts_with("ld-") || mapping.file_name().starts_with("ld.so");
    let code = maps.executable_files().filter(is_loader);
    let mut found: Vec<Forbidden> =
        code.map(|mapping| Forbidden { code: mapping.start.0..mapping.end.0, what: "the dynamic linker".into() }).collect();
    found.extend(of_c_library(process, maps, &LOADER, "the dynamic linker"));
    found
}

/// Functions of the C library, by name.
fn of_c_library(process: &Process, maps: &Maps, names: &[&[u8]], what: &str) -> Vec<Forbidden> {
    let mut found = Vec::new();
    let mut seen = std::collections::HashSet::new();
    let is_c_library = |mapping: &&Mapping| Allocator::Glibc.row().libraries.iter().any(|library| mapping.file_name().starts_with(library));
    for mapping in maps.executable_files().filter(is_c_library).filter(|mapping| seen.insert((mapping.device, mapping.inode))) {
        let Ok(file) = MappedFile::open(process, mapping) else { continue };
        file.elf.for_each_function(|function| {
            if names.contains(&function.name)
                && let Some(start) = address_of(maps, mapping, &file, function.vaddr)
            {
                found.push(Forbidden { code: start..start.saturating_add(function.size), what: what.to_owned() });
            }
        });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_reach_to_the_next_function_that_is_not_the_allocators() {
        let others = vec![0x1000..0x1100, 0x9000..0x9100, 0x4_0000..0x4_0100];
        let joined = pieces(vec![0x5000..0x5100, 0x4000..0x4100], others.clone(), &[]);
        assert_eq!((joined.len(), joined.first()), (1, Some(&(0x1100..0x9000))));
        let apart = pieces(vec![0x5000..0x5100, 0xa000..0xa100], others, &[0x5000]);
        assert_eq!(apart, [0x1100..0x9000, 0xa000..0xa100], "a single function that is no entry point");
    }
}
