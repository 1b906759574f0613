//! `/proc/PID/statm`: a process's memory in pages, as the kernel sums it from counts per CPU, so that it may be off by some hundred KiB.

use std::path::Path;

use super::handle::read_bounded;
use crate::units::page_bytes;

/// Bytes of the file at most: it has seven numbers.
const FILE_BYTES_MAX: u64 = 256;

/// Resident memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Statm {
    /// All, in bytes.
    pub resident_bytes: u64,
    /// Of files and shared memory, in bytes.
    pub shared_bytes: u64,
}

impl Statm {
    /// Reads that of the process with this directory under `/proc`. `None` if it has ended: then it has no memory.
    #[must_use]
    pub fn of(directory: &Path) -> Option<Self> {
        Self::parse(&read_bounded(&directory.join("statm"), FILE_BYTES_MAX).ok()?).filter(|statm| statm.resident_bytes > 0)
    }

    /// Parses the file: its second and third number (proc_pid_statm(5)). `None` if the bytes are malformed.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut numbers = std::str::from_utf8(bytes).ok()?.split_ascii_whitespace().skip(1);
        let mut bytes = || numbers.next()?.parse::<u64>().ok()?.checked_mul(page_bytes());
        Some(Self { resident_bytes: bytes()?, shared_bytes: bytes()? })
    }

    /// Bytes of memory that is neither of files nor shared.
    #[must_use]
    pub fn anonymous_bytes(&self) -> u64 {
        self.resident_bytes.saturating_sub(self.shared_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_is_the_second_number_and_what_is_shared_the_third() {
        let statm = Statm::parse(b"1200 300 100 5 0 400 0\n");
        assert_eq!(statm, Some(Statm { resident_bytes: 300 * page_bytes(), shared_bytes: 100 * page_bytes() }));
        assert_eq!(statm.map(|statm| statm.anonymous_bytes()), Some(200 * page_bytes()));
        for malformed in
            [&b""[..], b"1200", b"1200 300", b"1200 x 100", b"1200 99999999999999999999 1", b"1200 9999999999999999999 1", b"\xff \xff"]
        {
            assert_eq!(Statm::parse(malformed), None, "{malformed:?}");
        }
        assert_eq!(Statm::of("/proc/0".as_ref()), None);
    }

    /// The kernel also gives it in KiB.
    #[test]
    fn it_agrees_with_the_status_of_a_process_that_waits() {
        let cat = crate::process::testing::Cat::start("/bin/cat".as_ref(), None);
        let directory = format!("/proc/{}", cat.pid().0);
        let status = std::fs::read_to_string(format!("{directory}/status")).unwrap_or_default();
        let kib = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        let statm = Statm::of(directory.as_ref());
        assert_eq!(statm.map(|statm| statm.resident_bytes >> 10), kib("VmRSS:"));
        assert_eq!(statm.map(|statm| statm.anonymous_bytes() >> 10), kib("RssAnon:"));
    }
}
