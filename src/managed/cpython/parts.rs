//! A function of which the compiler has put a part elsewhere, in a file without a symbol for it.
//!
//! GCC moves what a profile shows to be rare into a part of its own (`.cold`, gcc/bb-reorder.cc), with an entry of its own in the unwind
//! information. Which part that is may surprise: of Debian's CPython 3.14.10, nearly the whole evaluation loop is in the cold one.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::machine::Machine;
use crate::probe::flow::for_each_jump;
use crate::process::elf::{Elf, ReadAt};
use crate::process::functions::Functions;

/// Bytes of the function that are read.
const CODE_BYTES_MAX: u64 = 1 << 20;

/// The part of a function that lies outside its own range: the other range into whose middle most of its jumps lead. A jump to another
/// function leads to its beginning.
pub(super) fn elsewhere<R: ReadAt>(elf: &Elf<R>, own: Range<u64>, functions: &Functions) -> Option<Range<u64>> {
    let code = elf.bytes_at(own.start, own.end.checked_sub(own.start)?.min(CODE_BYTES_MAX));
    most_entered(Machine::HOST, &code, own, |target| functions.around(target))
}

fn most_entered(machine: Machine, code: &[u8], own: Range<u64>, around: impl Fn(u64) -> Option<Range<u64>>) -> Option<Range<u64>> {
    let mut entered: BTreeMap<u64, (u32, u64)> = BTreeMap::new();
    for_each_jump(machine, code, own.start, |target| {
        let part = around(target).filter(|part| !own.contains(&target) && part.start != target && part.start != own.start);
        if let Some(part) = part {
            entered.entry(part.start).or_insert((0, part.end)).0 += 1;
        }
    });
    entered.into_iter().max_by_key(|&(_, (count, _))| count).map(|(start, (_, end))| start..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A jump to an address from one at `at`, or a conditional one.
    fn jump(machine: Machine, at: u64, to: u64, is_conditional: bool) -> Vec<u8> {
        match machine {
            Machine::X86_64 => {
                let mut code = if is_conditional { vec![0x0f, 0x84] } else { vec![0xe9] };
                let distance = to.wrapping_sub(at + code.len() as u64 + 4) as u32;
                code.extend(distance.to_le_bytes());
                code
            }
            // b.eq, b
            Machine::Aarch64 => {
                let words = (to.wrapping_sub(at) / 4) as u32;
                let word = if is_conditional { 0x5400_0000 | (words & 0x7_ffff) << 5 } else { 0x1400_0000 | words & 0x3ff_ffff };
                word.to_le_bytes().to_vec()
            }
        }
    }

    #[test]
    fn the_range_whose_middle_is_entered_most_often_is_the_other_part() {
        let own = 0x1000..0x1100;
        let ranges = [0x400..0x480, 0x500..0x900, 0x1000..0x1100, 0x2000..0x2100];
        let around = |addr: u64| ranges.iter().find(|range| range.contains(&addr)).cloned();
        for machine in [Machine::X86_64, Machine::Aarch64] {
            let mut code = Vec::new();
            // To the beginning of functions, into the middle of one, twice into the middle of another, and within itself.
            for (to, is_conditional) in [
                (0x2000, false),
                (0x2000, true),
                (0x2000, true),
                (0x2010, true),
                (0x510, true),
                (0x8fc, false),
                (0x1010, true),
                (0x3000, false),
            ] {
                code.extend(jump(machine, own.start + code.len() as u64, to, is_conditional));
            }
            assert_eq!(most_entered(machine, &code, own.clone(), around), Some(0x500..0x900));
            assert_eq!(most_entered(machine, &jump(machine, own.start, 0x2000, false), own.clone(), around), None);
            assert_eq!(most_entered(machine, &[], own.clone(), around), None);
        }
    }
}
