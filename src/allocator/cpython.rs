//! The functions of CPython's allocator of objects, found by a table that it keeps of them.
//!
//! No symbol of a stripped program names them, and whatever allocates objects calls them through a `PyMemAllocatorEx`: {context, malloc,
//! calloc, realloc, free}. One copy of it is there whether the debug hooks are used or not: theirs (`_PyMem_Debug` in Objects/obmalloc.c of
//! 3.8 to 3.11, `_PyRuntime.allocators.debug` in Include/internal/pycore_pymem_init.h since 3.12). It is three pairs {identifier, table},
//! of the domains raw ('r'), mem ('m') and obj ('o'); the last two have the same functions.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::Allocator;
use super::functions::{Family, find as find_function};
use super::in_file::{EntryPoint, FileAllocator};
use crate::process::file::MappedFile;
use crate::process::handle::Process;
use crate::process::maps::{Mapping, Maps};
use crate::units::Addr;

/// The file name of the library with functions in front of an interpreter's own (src/sampler/preload/python.c).
pub const IN_FRONT: &str = "libfragprof_python.so";
/// Bytes of a file's data that are searched at once, and how often: an interpreter has up to a few MiB, a program with one in it more.
const WINDOW_BYTES: usize = 1 << 20;
const WINDOWS_MAX: usize = 1024;
/// Words of a pair: the identifier, the context, four functions.
const PAIR_WORDS: usize = 6;
/// The identifiers, in their order.
const DOMAINS: [u64; 3] = [b'r' as u64, b'm' as u64, b'o' as u64];
/// The functions' names, in the table's order.
const NAMES: [&str; 4] = ["_PyObject_Malloc", "_PyObject_Calloc", "_PyObject_Realloc", "_PyObject_Free"];

/// The allocator of objects in `file`, an interpreter that a process maps at `mapping` and whose other functions are `found`. `None` if its
/// table was not found: the file is still being loaded, or objects are allocated by malloc.
#[must_use]
pub fn of_objects(
    process: &Process,
    maps: &Maps,
    mapping: &Mapping,
    file: &MappedFile,
    found: &FileAllocator,
) -> Option<Arc<FileAllocator>> {
    let is_file_s = |other: &&Mapping| other.inode == mapping.inode && other.device == mapping.device;
    let is_code = |addr: u64| maps.find(Addr(addr)).is_some_and(|own| own.permissions.execute && is_file_s(&own));
    let memory = File::open(process.directory().join("mem")).ok()?;
    let data = maps.mappings.iter().filter(is_file_s).filter(|own| own.permissions.write);
    let windows = data.flat_map(|own| (own.start.0..own.end.0).step_by(WINDOW_BYTES).map(|start| (start, own.end.0)));
    let functions = windows.take(WINDOWS_MAX).find_map(|(start, end)| {
        // A table may reach into the next window.
        let length = (WINDOW_BYTES + 8 * DOMAINS.len() * PAIR_WORDS).min(usize::try_from(end - start).ok()?);
        let mut bytes = vec![0; length];
        memory.read_exact_at(&mut bytes, start).ok()?;
        let words: Vec<u64> = bytes.chunks_exact(8).filter_map(|word| word.try_into().ok().map(u64::from_le_bytes)).collect();
        functions(&words, is_code)
    })?;
    let bias = file.elf.load_bias(mapping.start.0, mapping.offset)?;
    let entry_points = NAMES.iter().zip(functions).filter_map(|(name, addr)| {
        Some(EntryPoint {
            function: find_function(Family::Cpython, name.as_bytes())?,
            allocator: Allocator::Pymalloc,
            symbols: vec![(*name).to_owned()],
            vaddr: addr.wrapping_sub(bias),
            size: 0,
        })
    });
    let mut all: Vec<EntryPoint> = entry_points.collect();
    all.sort_by_key(|entry| entry.vaddr);
    Some(Arc::new(FileAllocator {
        allocator: Allocator::Pymalloc,
        prefix: String::new(),
        functions: all,
        function_starts: found.function_starts.clone(),
        exports_malloc: false,
        is_cpython: true,
    }))
}

/// The four functions of the table, if it is in these words.
fn functions(words: &[u64], is_code: impl Fn(u64) -> bool) -> Option<[u64; 4]> {
    words.windows(DOMAINS.len() * PAIR_WORDS).find_map(|window| {
        let mut pairs = window.chunks_exact(PAIR_WORDS).zip(DOMAINS).map(|(pair, domain)| match *pair {
            [id, 0, malloc, calloc, realloc, free] if id == domain => Some([malloc, calloc, realloc, free]),
            _ => None,
        });
        let [raw, mem, obj] = [pairs.next()??, pairs.next()??, pairs.next()??];
        (mem == obj && obj != raw && obj.into_iter().all(&is_code)).then_some(obj)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const RAW: [u64; 4] = [0x1000, 0x1100, 0x1200, 0x1300];
    const OBJECTS: [u64; 4] = [0x2000, 0x2100, 0x2200, 0x2300];

    fn table(domains: [(char, [u64; 4]); 3]) -> Vec<u64> {
        let pairs = domains.into_iter().flat_map(|(id, functions)| [u64::from(u32::from(id)), 0].into_iter().chain(functions));
        [7, 7].into_iter().chain(pairs).chain([7]).collect()
    }

    #[test]
    fn the_functions_of_objects_are_those_of_two_domains() {
        let is_code = |addr| (0x1000..0x3000).contains(&addr);
        let words = table([('r', RAW), ('m', OBJECTS), ('o', OBJECTS)]);
        assert_eq!(functions(&words, is_code), Some(OBJECTS));
        assert_eq!(functions(&words, |addr| addr < 0x2200), None, "not all is code");
        assert_eq!(functions(&words[..words.len() - 2], is_code), None, "cut");
        assert_eq!(functions(&table([('r', RAW), ('m', RAW), ('o', RAW)]), is_code), None, "objects by malloc");
        assert_eq!(functions(&table([('r', RAW), ('m', RAW), ('o', OBJECTS)]), is_code), None);
        assert_eq!(functions(&table([('r', RAW), ('o', OBJECTS), ('m', OBJECTS)]), is_code), None);
    }
}
