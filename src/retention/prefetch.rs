//! Asks the processor for memory that will be read soon, so that cache misses overlap. Pure.

/// Asks for the line with an item; nothing where there is no such instruction.
#[inline]
pub fn prefetch<T>(items: &[T], at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: the instruction reads nothing that the program sees, and ignores addresses that are not mapped.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(items.as_ptr().wrapping_add(at).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (items, at);
}
