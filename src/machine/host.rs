//! Requirements on this machine.

use crate::units::PAGE_BYTES;

/// A machine with pages of another size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("this kernel has pages of {page_bytes} bytes: fragprof supports only pages of {PAGE_BYTES} bytes")]
pub struct OtherPages {
    /// Bytes of a page here.
    pub page_bytes: u64,
}

/// Whether processes of this machine can be watched: residency, extents and the census count in pages of [`PAGE_BYTES`].
///
/// # Errors
/// If its pages have another size (arm64 kernels are built for 4, 16 or 64 KiB).
pub fn check() -> Result<(), OtherPages> {
    // SAFETY: reads a constant of the process.
    let answer = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    check_pages(u64::try_from(answer).unwrap_or(0))
}

fn check_pages(page_bytes: u64) -> Result<(), OtherPages> {
    if page_bytes == PAGE_BYTES { Ok(()) } else { Err(OtherPages { page_bytes }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_another_size_are_refused_by_name() {
        assert_eq!(check_pages(4096), Ok(()));
        assert!(check_pages(65_536).is_err_and(|error| error.to_string().contains("65536 bytes")));
    }
}
