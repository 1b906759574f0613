//! The vDSO's image. The kernel maps the same one into every 64-bit process, so this process's image is used for all of them, including
//! those that have ended.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};

/// Largest vDSO that is read: it has two to five pages.
const VDSO_BYTES_MAX: u64 = 1 << 20;

/// This process's vDSO as a file in memory.
///
/// # Errors
/// If there is none, or it cannot be read.
pub fn image() -> io::Result<File> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let line = maps.lines().find(|line| line.ends_with("[vdso]"));
    let (start, end) = line.and_then(range).ok_or(io::ErrorKind::NotFound)?;
    if end - start > VDSO_BYTES_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut memory = File::open("/proc/self/mem")?;
    memory.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    memory.take(end - start).read_to_end(&mut bytes)?;
    let mut file = File::from(rustix::fs::memfd_create("vdso", rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all(&bytes)?;
    Ok(file)
}

fn range(line: &str) -> Option<(u64, u64)> {
    let (start, rest) = line.split_once('-')?;
    let (end, _) = rest.split_once(' ')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    (start < end).then_some((start, end))
}
