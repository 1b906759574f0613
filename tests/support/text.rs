//! Reads a process's machine code from outside: where it differs from its file, there is a probe. This shows what the kernel probes,
//! regardless of who requested it.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use object::{Object, ObjectSegment, ObjectSymbol};

/// Bytes of a function that are compared. A probe is within its first few instructions.
const LOOK_BYTES: u64 = 64;

/// Whether the code of `symbol` of `file` in process `pid` differs from the file's. `None`: no such process, mapping or symbol.
pub fn is_probed(pid: u32, file: &Path, symbol: &str) -> Option<bool> {
    let data = fs::read(file).ok()?;
    let elf = object::File::parse(&*data).ok()?;
    let found = elf.dynamic_symbols().chain(elf.symbols()).find(|s| s.name() == Ok(symbol) && s.is_definition())?;
    let size = if found.size() == 0 { LOOK_BYTES } else { found.size().min(LOOK_BYTES) };
    let segment = elf.segments().find(|s| (s.address()..s.address() + s.size()).contains(&found.address()))?;
    let offset = segment.file_range().0 + (found.address() - segment.address());
    let in_file = data.get(usize::try_from(offset).ok()?..usize::try_from(offset + size).ok()?)?;

    let wanted = fs::canonicalize(file).ok()?;
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let address = maps.lines().find_map(|line| {
        let mut fields = line.split_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
        let executable = fields.next()?.contains('x');
        let mapped_at = u64::from_str_radix(fields.next()?, 16).ok()?;
        let path = Path::new(fields.nth(2)?);
        let inside = (mapped_at..mapped_at + (end - start)).contains(&offset);
        (executable && inside && path == wanted).then(|| start + (offset - mapped_at))
    })?;
    let mut in_memory = vec![0; in_file.len()];
    fs::File::open(format!("/proc/{pid}/mem")).ok()?.read_exact_at(&mut in_memory, address).ok()?;
    Some(in_memory != in_file)
}

/// Offset of the first instruction of `symbol` in `file`.
pub fn file_offset(file: &Path, symbol: &str) -> Option<u64> {
    let data = fs::read(file).ok()?;
    let elf = object::File::parse(&*data).ok()?;
    let found = elf.dynamic_symbols().find(|s| s.name() == Ok(symbol) && s.is_definition())?;
    let segment = elf.segments().find(|s| (s.address()..s.address() + s.size()).contains(&found.address()))?;
    Some(segment.file_range().0 + (found.address() - segment.address()))
}

/// Path of the C library that process `pid` has mapped.
pub fn libc_of(pid: u32) -> Option<std::path::PathBuf> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    maps.lines().find_map(|line| line.split_whitespace().nth(5).filter(|p| p.ends_with("/libc.so.6")).map(Into::into))
}
