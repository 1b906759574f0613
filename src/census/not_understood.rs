//! Why a process's heap, or a part of it, could not be read. Pure; uses the mappings and the program's own ELF header.
//!
//! Nothing is guessed: a reason names what was seen (a mapped file, a header) and what was not found.

use super::memory::Memory;
use super::objects::Objects;
use crate::allocator::{Allocator, Row};
use crate::process::Maps;
use crate::process::maps::Permissions;

/// Libraries of allocators without a registry row or reader: the prefix of the file's name, and the allocator.
const UNSUPPORTED: [(&str, &str); 10] = [
    ("libasan", "AddressSanitizer's allocator"),
    ("libtsan", "ThreadSanitizer's allocator"),
    ("liblsan", "LeakSanitizer's allocator"),
    ("libclang_rt.asan", "AddressSanitizer's allocator"),
    ("libhardened_malloc", "hardened_malloc"),
    ("libscudo", "Scudo"),
    ("librpmalloc", "rpmalloc"),
    ("libhoard", "Hoard"),
    ("libtbbmalloc", "TBB's scalable allocator"),
    ("libdieharder", "DieHarder"),
];

/// Libraries that change the layout of glibc's blocks.
const DEBUGGING: [&str; 2] = ["libc_malloc_debug.so", "libefence.so"];

fn rows() -> impl Iterator<Item = &'static Row> {
    Allocator::known().map(Allocator::row)
}

/// The reasons, given the allocators whose heaps were found.
#[must_use]
pub fn reasons(memory: &dyn Memory, maps: &Maps, objects: &Objects<'_>, found: &[Allocator]) -> Vec<String> {
    let mut reasons = Vec::new();
    let names = file_names(maps);
    let loaded = |start: &str| names.iter().find(|name| name.starts_with(start));
    let of_registry = rows().filter(|row| row.sought.is_none()).flat_map(|row| row.libraries.iter().map(|start| (*start, row.name)));
    for (start, allocator) in of_registry.chain(UNSUPPORTED) {
        if let Some(name) = loaded(start) {
            reasons.push(format!("{allocator} is loaded ({name}): its heap is not supported, so a census counts none of its blocks"));
        }
    }
    for name in DEBUGGING.iter().filter_map(|start| loaded(start)) {
        reasons.push(format!("{name} is loaded: blocks that it checks are larger than the program requested"));
    }
    for (row, sought) in rows().filter_map(|row| Some((row, row.sought?))) {
        // An allocator that is in nearly every process has no heap if another one serves malloc.
        let other_serves = row.gives_way && (!found.is_empty() || !reasons.is_empty());
        let named = row.libraries.iter().find_map(|start| loaded(start));
        if let Some(name) = named.filter(|_| !found.contains(&row.allocator) && !other_serves) {
            reasons.push(format!(
                "{} is loaded ({name}), but no {sought} was found in its data: not used yet, built with another layout, or swapped out",
                row.name
            ));
        }
    }
    if found.is_empty() && reasons.is_empty() {
        reasons.push(of_static_program(memory, objects, maps));
    }
    reasons
}

/// Adds what the symbols of the mapped files show: an allocator that is linked into a program has no file of its own.
pub fn add_by_symbols(reasons: &mut Vec<String>, modules: impl Iterator<Item = (Allocator, String)>, found: &[Allocator]) {
    for (allocator, name) in modules {
        let is_told = found.contains(&allocator) || reasons.iter().any(|reason| reason.contains(&name) && !name.is_empty());
        if is_told || (allocator.row().gives_way && (!found.is_empty() || !reasons.is_empty())) {
            continue;
        }
        match allocator {
            Allocator::Other => reasons.push(format!(
                "{name} defines its own malloc and free: an unknown allocator, or a wrapper; blocks in its own heap are not counted"
            )),
            known if known.row().sought.is_none() => {
                reasons.push(format!(
                    "{} is linked into {name}: its heap is not supported, so a census counts none of its blocks",
                    known.name()
                ));
            }
            known => reasons.push(format!(
                "{} is linked into {name}, but its heap was not found: not used yet, or built with another layout",
                known.name()
            )),
        }
    }
}

/// Whether a reason names the mimalloc that is linked into CPython.
#[must_use]
pub fn is_mimalloc_of_python(reason: &str) -> bool {
    reason.strip_prefix("mimalloc is linked into ").is_some_and(|rest| rest.starts_with("libpython") || rest.starts_with("python"))
}

/// A program without any libc among its mapped files: linked statically, or not by a C compiler at all.
fn of_static_program(memory: &dyn Memory, objects: &Objects<'_>, maps: &Maps) -> String {
    if maps.mappings.is_empty() {
        return "no mappings: a kernel thread, or a process that has ended".into();
    }
    if is_go(memory, objects, maps) {
        return "Go program without a C heap: its memory is managed by the Go runtime, not by malloc".into();
    }
    "static program, or one with its own allocator: no glibc, musl, jemalloc, tcmalloc (of gperftools or Google) or mimalloc heap was found in its data".into()
}

/// Whether the program was linked by Go. Only its own data is examined, not that of its libraries.
#[must_use]
pub fn is_go(memory: &dyn Memory, objects: &Objects<'_>, maps: &Maps) -> bool {
    let program = maps.mappings.iter().find_map(|mapping| mapping.path()?.file_name()?.to_str());
    let mut own = objects.iter().filter(|one| program == Some(one.object().name.as_str()));
    has_go_note(memory, maps) || own.any(|one| is_go_data(&one.data()))
}

/// The Go linker's build information begins its data segment (`buildInfoMagic` of debug/buildinfo).
fn is_go_data(data: &[u8]) -> bool {
    const MAGIC: &[u8] = b"\xff Go buildinf:";
    data.chunks(16).take(4096).any(|line| line.starts_with(MAGIC))
}

/// The note "Go" with the build id, in the first page of the program.
fn has_go_note(memory: &dyn Memory, maps: &Maps) -> bool {
    let is_text = |allowed: Permissions| allowed.read && !allowed.write;
    let first = maps.mappings.iter().find(|mapping| mapping.path().is_some() && mapping.offset.0 == 0 && is_text(mapping.permissions));
    let page = first.and_then(|mapping| memory.bytes(mapping.start.0, 4096));
    // namesz 4, descsz, type 4 (ELF_NOTE_GOBUILDID_TAG), name.
    page.is_some_and(|page| page.windows(8).any(|window| window == b"\x04\0\0\0Go\0\0"))
}

/// Names of the mapped files, without directories.
fn file_names(maps: &Maps) -> Vec<String> {
    let mut names: Vec<String> =
        maps.mappings.iter().filter_map(|mapping| mapping.path()?.file_name()).map(|name| name.to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::Fixture;

    fn reasons_for(maps: &str, found: &[Allocator]) -> Vec<String> {
        let maps = Maps::parse(maps.as_bytes());
        let memory = Fixture::with_maps(maps.clone());
        reasons(&memory, &maps, &Objects::of(&memory, &maps), found)
    }

    const LIBC: &str = "7f0000000000-7f0000001000 r--p 00000000 08:01 5 /lib/x86_64-linux-gnu/libc.so.6\n";

    #[test]
    fn an_allocator_without_a_reader_is_named_even_if_another_heap_was_read() {
        let maps = format!("{LIBC}7f0000002000-7f0000003000 r--p 00000000 08:01 6 /usr/lib/libsnmalloc.so.1\n");
        let reasons = reasons_for(&maps, &[Allocator::Glibc]);
        assert_eq!(reasons.len(), 1);
        assert!(reasons.iter().all(|reason| reason.contains("snmalloc is loaded (libsnmalloc.so.1)")), "{reasons:?}");
    }

    #[test]
    fn glibc_without_an_arena_is_a_reason_only_if_nothing_else_serves_malloc() {
        assert!(reasons_for(LIBC, &[]).iter().any(|reason| reason.contains("no arena in use was found")));
        assert_eq!(reasons_for(LIBC, &[Allocator::Glibc]), Vec::<String>::new());
        assert_eq!(reasons_for(LIBC, &[Allocator::Jemalloc]), Vec::<String>::new());
    }

    #[test]
    fn each_library_without_a_reader_is_named() {
        for (start, allocator) in UNSUPPORTED {
            let maps = format!("{LIBC}7f0000002000-7f0000003000 r--p 00000000 08:01 6 /usr/lib/{start}.so.1\n");
            let reasons = reasons_for(&maps, &[Allocator::Glibc]);
            assert!(matches!(reasons.as_slice(), [one] if one.starts_with(allocator) && one.contains("not supported")), "{reasons:?}");
        }
    }

    #[test]
    fn a_reader_that_found_nothing_names_what_it_looked_for() {
        let read = [
            ("libjemalloc", "jemalloc", "page map"),
            ("libtcmalloc", "tcmalloc", "page map"),
            ("libmimalloc", "mimalloc", "segment or page map"),
            ("ld-musl-", "musl", "mallocng metadata"),
            ("libc.so.6", "glibc", "arena in use"),
            ("libc-2.", "glibc", "arena in use"),
        ];
        for (start, allocator, sought) in read {
            let maps = format!("7f0000002000-7f0000003000 r--p 00000000 08:01 6 /usr/lib/{start}x.so\n");
            let reasons = reasons_for(&maps, &[]);
            let said = |one: &str| one.starts_with(allocator) && one.contains(&format!("no {sought} was found"));
            assert!(matches!(reasons.as_slice(), [one] if said(one)), "{reasons:?}");
        }
    }

    #[test]
    fn libraries_that_check_blocks_are_named_in_addition_to_the_heap() {
        for start in DEBUGGING {
            let maps = format!("{LIBC}7f0000002000-7f0000003000 r--p 00000000 08:01 6 /usr/lib/{start}.0\n");
            let reasons = reasons_for(&maps, &[Allocator::Glibc]);
            assert!(matches!(reasons.as_slice(), [one] if one.contains("blocks that it checks")), "{reasons:?}");
        }
    }

    #[test]
    fn a_process_without_mappings_and_a_go_program_are_named_as_such() {
        assert!(reasons_for("", &[]).iter().all(|reason| reason.starts_with("no mappings")));
        let maps = Maps::parse(b"00400000-00500000 r-xp 00000000 08:01 5 /bin/go\n00500000-00501000 rw-p 00100000 08:01 5 /bin/go\n");
        let mut memory = Fixture::with_maps(maps.clone());
        memory.write(0x50_0000, b"\xff Go buildinf:\x08\x02");
        let reasons = reasons(&memory, &maps, &Objects::of(&memory, &maps), &[]);
        assert!(reasons.iter().all(|reason| reason.starts_with("Go program")), "{reasons:?}");
    }

    #[test]
    fn allocators_linked_into_a_program_are_recognised_by_their_symbols() {
        let told = |allocator: Allocator, found: &[Allocator], before: Vec<String>| {
            let mut reasons = before;
            add_by_symbols(&mut reasons, std::iter::once((allocator, "server".to_owned())), found);
            reasons
        };
        assert!(told(Allocator::Mimalloc, &[], Vec::new()).iter().all(|reason| reason.contains("mimalloc is linked into server")));
        assert!(
            told(Allocator::Other, &[Allocator::Glibc], Vec::new()).iter().all(|reason| reason.contains("defines its own malloc and free"))
        );
        assert!(told(Allocator::Jemalloc, &[], Vec::new()).iter().all(|reason| reason.contains("its heap was not found")));
        assert!(told(Allocator::Jemalloc, &[Allocator::Jemalloc], Vec::new()).is_empty());
        assert!(told(Allocator::Glibc, &[Allocator::Jemalloc], Vec::new()).is_empty());
        // Already reported.
        assert_eq!(told(Allocator::Mimalloc, &[], vec!["mimalloc is loaded (server)".into()]).len(), 1);
    }

    #[test]
    fn a_static_program_with_nothing_known_says_so() {
        let reasons = reasons_for("00400000-00500000 r-xp 00000000 08:01 5 /bin/static\n", &[]);
        assert!(reasons.iter().all(|reason| reason.starts_with("static program")), "{reasons:?}");
    }
}
