//! The size of user space of this kernel, and what lies above its addresses.

use std::sync::OnceLock;

/// Bits of an address of user space that kernels of arm64 are built with (arch/arm64/Kconfig, `ARM64_VA_BITS`); those with 52 give addresses
/// above 48 bits only to programs that request them.
const ADDRESS_BITS: [u32; 5] = [48, 47, 42, 39, 36];
/// Tried below each boundary: a page of every size.
const TRIED_BYTES: usize = 64 << 10;

/// Bits of an address of user code here: the most for which the kernel maps memory just below the boundary, or says that some is there.
/// 48 if none can be mapped.
#[must_use]
pub fn address_bits() -> u32 {
    let [most, ..] = ADDRESS_BITS;
    ADDRESS_BITS.into_iter().find(|&bits| is_user_space((1usize << bits) - TRIED_BYTES)).unwrap_or(most)
}

/// An address of user code without the signature that arm64 puts into the bits above (FEAT_PAuth), where return addresses have one.
#[must_use]
pub fn code_address(word: u64) -> u64 {
    static MASK: OnceLock<u64> = OnceLock::new();
    if cfg!(target_arch = "aarch64") { word & *MASK.get_or_init(|| (1 << address_bits()) - 1) } else { word }
}

/// Whether user space has this address.
fn is_user_space(addr: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a mapping of our own without access; `MAP_FIXED_NOREPLACE` maps over nothing.
    let start = unsafe { libc::mmap(std::ptr::without_provenance_mut(addr), TRIED_BYTES, libc::PROT_NONE, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return std::io::Error::last_os_error().raw_os_error() == Some(libc::EEXIST);
    }
    // SAFETY: the mapping was made above and nothing refers to it.
    unsafe { libc::munmap(start, TRIED_BYTES) };
    start.addr() == addr
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_boundary_of_user_space_is_found_without_leaving_a_mapping() {
        let bits = address_bits();
        assert!(ADDRESS_BITS.contains(&bits), "{bits}");
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        let tried = format!("{:x}-", (1usize << bits) - TRIED_BYTES);
        assert!(!maps.lines().any(|line| line.trim_start_matches('0').starts_with(&tried)), "{maps}");
    }
}
