//! Which memory is a thread's stack, and what its words say about where the thread is. Pure but for [`guard_below`].

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use super::refusal::Unfit;
use crate::process::maps::{Backing, Maps};
use crate::units::{Addr, page_bytes};

/// Deepest stack that is examined.
pub const DEPTH_BYTES_MAX: u64 = 1 << 20;
/// Pages searched for a guard at a time, and in all: stacks of 64 MiB.
const PAGES_AT_ONCE: usize = 4096;
const PAGES_MAX: u64 = 16_384;
/// `PM_GUARD_REGION`, a page made a guard by madvise, since Linux 6.15 (Documentation/admin-guide/mm/pagemap.rst).
const GUARD: u64 = 1 << 58;

/// Code in which no thread may be while the call is made, and what to call it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forbidden {
    /// Its addresses.
    pub code: Range<u64>,
    /// What it is.
    pub what: String,
}

/// A thread's stack from its lowest address to the end of its oldest frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ThreadStack {
    /// Lowest address that is known to be its own.
    pub low: u64,
    /// Where its oldest frame ends.
    pub end: u64,
}

/// Finds the stack in which a stopped thread's stack pointer lies. The main thread's is named by the kernel; that thread's control block
/// lies elsewhere, possibly in the same mapping as an alternate signal stack. Another thread's stack has the thread's control block, to which
/// the thread pointer points or (arm64) just above it, at its upper end (glibc, nptl/allocatestack.c; musl, pthread_create.c); at its lower end
/// lies a guard, a mapping without permissions, or pages that `guard` finds.
///
/// # Errors
/// If the stack pointer lies anywhere else: in a coroutine's stack, or an alternate signal stack, below which code is interrupted that
/// cannot be seen from there.
pub fn find(
    maps: &Maps,
    is_main: bool,
    stack_pointer: u64,
    thread_pointer: u64,
    guard: impl FnOnce(Range<u64>) -> Option<u64>,
) -> Result<ThreadStack, Unfit> {
    let index = maps.mappings.iter().position(|mapping| mapping.contains(Addr(stack_pointer))).ok_or(Unfit::ForeignStack)?;
    let mapping = maps.mappings.get(index).filter(|mapping| mapping.permissions.write && mapping.permissions.read);
    let mapping = mapping.ok_or(Unfit::ForeignStack)?;
    let (start, end) = (mapping.start.0, mapping.end.0);
    let stack = match &mapping.backing {
        Backing::Named(name) if name == "[stack]" => ThreadStack { low: start, end },
        _ if is_main || !(stack_pointer..end).contains(&thread_pointer) => return Err(Unfit::ForeignStack),
        _ => {
            let below = index.checked_sub(1).and_then(|below| maps.mappings.get(below));
            let has_guard_mapping = below.is_some_and(|below| {
                let permissions = below.permissions;
                below.end.0 == start && !permissions.read && !permissions.write && !permissions.execute
            });
            let low = guard(start..stack_pointer).or(has_guard_mapping.then_some(start)).ok_or(Unfit::Unguarded)?;
            ThreadStack { low, end: thread_pointer }
        }
    };
    if stack.end - stack_pointer > DEPTH_BYTES_MAX {
        return Err(Unfit::DeepStack);
    }
    Ok(stack)
}

/// The forbidden code that a word of the stack, or a register with a code address, points into. A scan covers every return address, also where
/// unwinding would stop; words that only look like one refuse more than is needed.
#[must_use]
pub fn forbidden_at(words: impl Iterator<Item = u64>, forbidden: &[Forbidden]) -> Option<&Forbidden> {
    let (low, high) = forbidden.iter().fold((u64::MAX, 0), |(low, high), one| (low.min(one.code.start), high.max(one.code.end)));
    let mut near = words.filter(|word| (low..=high).contains(word));
    // A return address may be the first one after a function that never returns.
    near.find_map(|word| forbidden.iter().find(|one| one.code.start <= word && word <= one.code.end))
}

/// The end of the highest guard page in a range, by the process's page map; `None` if there is none, or the kernel does not show them.
#[must_use]
pub fn guard_below(directory: &Path, range: Range<u64>) -> Option<u64> {
    let file = File::open(directory.join("pagemap")).ok()?;
    let page = page_bytes();
    let first = (range.start / page).max((range.end / page).saturating_sub(PAGES_MAX));
    let mut end = range.end / page;
    let mut bytes = vec![0; PAGES_AT_ONCE * 8];
    while end > first {
        let start = end.saturating_sub(PAGES_AT_ONCE as u64).max(first);
        let part = bytes.get_mut(..(end - start) as usize * 8)?;
        file.read_exact_at(part, start * 8).ok()?;
        let entries = part.as_chunks::<8>().0;
        if let Some(last) = entries.iter().rposition(|entry| u64::from_le_bytes(*entry) & GUARD != 0) {
            return Some((start + last as u64 + 1) * page);
        }
        end = start;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn maps() -> Maps {
        Maps::parse(
            b"10000-11000 ---p 00000000 00:00 0 \n11000-20000 rw-p 00000000 00:00 0 \n20000-30000 rw-p 00000000 00:00 0 [heap]\n\
              40000-60000 rw-p 00000000 00:00 0 \n500000000-500200000 rw-p 00000000 00:00 0 [stack]\n",
        )
    }

    #[test]
    fn a_stack_lies_between_its_guard_and_the_threads_control_block() {
        let no_guard = |_| None;
        assert_eq!(find(&maps(), false, 0x18000, 0x1f000, no_guard), Ok(ThreadStack { low: 0x11000, end: 0x1f000 }));
        assert_eq!(find(&maps(), false, 0x18000, 0x1f000, |_| Some(0x15000)), Ok(ThreadStack { low: 0x15000, end: 0x1f000 }));
        assert_eq!(find(&maps(), true, 0x5_001f_0000, 0x1f000, no_guard), Ok(ThreadStack { low: 0x5_0000_0000, end: 0x5_0020_0000 }));
    }

    #[test]
    fn other_memory_and_stacks_without_a_guard_are_refused() {
        let no_guard = |_| None;
        assert_eq!(find(&maps(), false, 0x25000, 0x1f000, no_guard), Err(Unfit::ForeignStack), "a coroutine in the heap");
        assert_eq!(find(&maps(), false, 0x1f800, 0x1f000, no_guard), Err(Unfit::ForeignStack), "above the control block");
        assert_eq!(find(&maps(), true, 0x18000, 0x1f000, no_guard), Err(Unfit::ForeignStack), "an alternate signal stack");
        assert_eq!(find(&maps(), false, 0x48000, 0x5f000, no_guard), Err(Unfit::Unguarded));
        assert_eq!(find(&maps(), false, 0x10800, 0x1f000, no_guard), Err(Unfit::ForeignStack), "in a guard");
        assert_eq!(find(&maps(), false, 0x1, 0x1f000, no_guard), Err(Unfit::ForeignStack));
        assert_eq!(find(&maps(), true, 0x5_0000_1000, 0, no_guard), Err(Unfit::DeepStack));
    }

    #[test]
    fn a_word_that_points_into_forbidden_code_is_found() {
        let forbidden =
            [Forbidden { code: 0x1000..0x2000, what: "malloc".into() }, Forbidden { code: 0x9000..0xa000, what: "the loader".into() }];
        let found = |words: &[u64]| forbidden_at(words.iter().copied(), &forbidden).map(|one| one.what.as_str());
        assert_eq!(found(&[1, 2, 0x5000, u64::MAX]), None);
        assert_eq!(found(&[1, 0x2000]), Some("malloc"));
        assert_eq!(found(&[0x5000, 0x9500]), Some("the loader"));
        assert_eq!(forbidden_at([0].into_iter(), &[]), None);
    }
}
