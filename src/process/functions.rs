//! Where the functions of a file begin and end, from its unwind information.

use std::ops::Range;

use gimli::{BaseAddresses, CieOrFde, EhFrame, LittleEndian, UnwindSection as _};

use super::elf::{Elf, ReadAt};

/// Maximum size of the unwind information: glibc's has about 100 KB, CPython's 1 MB.
const UNWIND_BYTES_MAX: u64 = 4 << 20;
/// Maximum size of a function: glibc's largest has about 60 KB, CPython's evaluation loop 90.
const FUNCTION_BYTES_MAX: u64 = 256 << 10;

/// The address ranges of a file's functions, including those without a symbol.
#[derive(Debug)]
pub struct Functions(Vec<Range<u64>>);

impl Functions {
    /// The functions of a file; none without unwind information. Corrupt parts are skipped.
    #[must_use]
    pub fn of<R: ReadAt>(elf: &Elf<R>) -> Self {
        let (Some(bytes), Some(vaddr)) = (elf.section(b".eh_frame", UNWIND_BYTES_MAX), elf.section_vaddr(b".eh_frame")) else {
            return Self(Vec::new());
        };
        let bases = BaseAddresses::default().set_eh_frame(vaddr);
        let mut frame = EhFrame::new(&bytes, LittleEndian);
        frame.set_address_size(8);
        let mut ranges = Vec::new();
        let mut entries = frame.entries(&bases);
        while let Ok(Some(entry)) = entries.next() {
            let CieOrFde::Fde(partial) = entry else { continue };
            let Ok(function) = partial.parse(EhFrame::cie_from_offset) else { continue };
            let (begin, bytes) = (function.initial_address(), function.len());
            if (1..=FUNCTION_BYTES_MAX).contains(&bytes) && elf.is_code(begin) {
                ranges.push(begin..begin.saturating_add(bytes));
            }
        }
        ranges.sort_unstable_by_key(|range| (range.start, range.end));
        Self(ranges)
    }

    /// The function that contains an address.
    #[must_use]
    pub fn around(&self, vaddr: u64) -> Option<Range<u64>> {
        let behind = self.0.partition_point(|range| range.start <= vaddr);
        self.0.get(behind.checked_sub(1)?).filter(|range| range.contains(&vaddr)).cloned()
    }
}
