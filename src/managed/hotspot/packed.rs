//! HotSpot's packed numbers: UNSIGNED5 (utilities/unsigned5.hpp), and the line numbers of a method (oops/compressedLineNumberStream). Pure.

/// Maximum number of lines kept of a method: one for each bytecode.
const LINES_MAX: usize = 1 << 16;

/// How a version of HotSpot packs numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Subtracted from each byte: 1 since JDK 20, in which no byte of a number is 0.
    excluded: u32,
}

impl Packing {
    /// That of a version.
    #[must_use]
    pub fn of_version(major: u32) -> Self {
        Self { excluded: u32::from(major >= 20) }
    }

    /// The number at `at`, which moves behind it; `None` if the bytes end before.
    pub fn number(self, bytes: &[u8], at: &mut usize) -> Option<u32> {
        /// A byte below this is a number's last.
        const LAST: u32 = 192;
        const BITS: u32 = 6;
        const LONGEST: u32 = 5;
        let mut sum = 0u32;
        for place in 0..LONGEST {
            let byte = u32::from(*bytes.get(*at)?);
            *at += 1;
            sum = sum.wrapping_add(byte.checked_sub(self.excluded)? << (BITS * place));
            if byte < LAST {
                break;
            }
        }
        Some(sum)
    }

    fn signed(self, bytes: &[u8], at: &mut usize) -> Option<i32> {
        let number = self.number(bytes, at)?;
        Some((number >> 1) as i32 ^ -((number & 1) as i32))
    }

    /// The lines of a method: for each bytecode index at which one begins, the line, in the order of the index.
    #[must_use]
    pub fn lines(self, bytes: &[u8]) -> Vec<(u16, u32)> {
        const END: u8 = 0;
        /// Two numbers follow; any other byte has both of them, the index's in five bits and the line's in three.
        const LONG: u8 = 0xff;
        let (mut at, mut index, mut line, mut lines) = (0usize, 0i32, 0i32, Vec::new());
        while let Some(&byte) = bytes.get(at).filter(|&&byte| byte != END) {
            at += 1;
            let step = match byte {
                LONG => self.signed(bytes, &mut at).zip(self.signed(bytes, &mut at)),
                _ => Some((i32::from(byte >> 3), i32::from(byte & 7))),
            };
            let Some((indices, lines_on)) = step else { break };
            (index, line) = (index.wrapping_add(indices), line.wrapping_add(lines_on));
            if let (Ok(index), Ok(line)) = (u16::try_from(index), u32::try_from(line)) {
                lines.push((index, line));
            }
            if lines.len() >= LINES_MAX {
                break;
            }
        }
        // Compilers may write them in another order.
        lines.sort_by_key(|(index, _)| *index);
        lines
    }
}

/// The line of a bytecode index; 0 = not known.
#[must_use]
pub fn line_at(lines: &[(u16, u32)], index: u16) -> u32 {
    let after = lines.partition_point(|(first, _)| *first <= index);
    after.checked_sub(1).and_then(|at| lines.get(at)).map_or(0, |(_, line)| *line)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    const OLD: Packing = Packing { excluded: 0 };
    const NEW: Packing = Packing { excluded: 1 };

    /// As HotSpot packs (`UNSIGNED5::encode_multi_digit`): digits of 64 above the 192 that end a number.
    fn pack(packing: Packing, number: u32) -> Vec<u8> {
        let last = 192 - packing.excluded;
        let (mut rest, mut bytes) = (number, Vec::new());
        for _ in 0..4 {
            if rest < last {
                break;
            }
            let digit = last + (rest - last) % 64;
            bytes.push((digit + packing.excluded) as u8);
            rest = (rest - digit) >> 6;
        }
        bytes.push((rest + packing.excluded) as u8);
        bytes
    }

    proptest! {
        #[test]
        fn a_packed_number_is_read_back(number in any::<u32>(), small in 0u32..70_000) {
            for packing in [OLD, NEW] {
                for number in [number, small] {
                    let bytes = pack(packing, number);
                    let mut at = 0;
                    prop_assert_eq!(packing.number(&bytes, &mut at), Some(number));
                    prop_assert_eq!(at, bytes.len());
                }
            }
        }

        #[test]
        fn any_bytes_give_lines_in_order(bytes in proptest::collection::vec(any::<u8>(), 0..300), index: u16) {
            for packing in [OLD, NEW] {
                let lines = packing.lines(&bytes);
                prop_assert!(lines.is_sorted_by_key(|(index, _)| *index));
                let _ = line_at(&lines, index);
            }
        }
    }

    #[test]
    fn lines_hold_until_the_next_one() {
        // Index 0 line 7; 4 on, 1 on; by numbers: 100 on, 3 back.
        let bytes = [7, 4 << 3 | 1, 0xff, 201, 6, 0, 9];
        let packed_100 = pack(OLD, 200);
        let bytes = [&bytes[..3], &packed_100, &[5, 0, 9]].concat();
        let lines = OLD.lines(&bytes);
        assert_eq!(lines, [(0, 7), (4, 8), (104, 5)]);
        assert_eq!([0, 3, 4, 103, 104, 9999].map(|index| line_at(&lines, index)), [7, 7, 8, 8, 5, 5]);
        assert_eq!(line_at(&[(3, 9)], 2), 0);
    }
}
