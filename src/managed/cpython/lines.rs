//! The line of an instruction, by a code object's table.
//!
//! Each reader goes over the table once, entry by entry, to the entry that contains the instruction. Instructions are byte offsets in the
//! bytecode. What follows a malformed entry has no line.

use super::layout::LineFormat;

/// The line of an instruction; 0 = the table says that it has none, or does not reach it. Before the first instruction it is the first line.
/// `is_whole`: the table is not cut.
#[must_use]
pub fn line_of(format: LineFormat, table: &[u8], is_whole: bool, first_line: u32, instruction: i64) -> u32 {
    let Ok(instruction) = u64::try_from(instruction) else { return first_line };
    let first_line = i64::from(first_line);
    let line = match format {
        LineFormat::Lnotab => lnotab(table, is_whole, first_line, instruction),
        LineFormat::Ranges => ranges(table, first_line, instruction),
        LineFormat::Locations => locations(table, first_line, instruction),
    };
    line.and_then(|line| u32::try_from(line).ok()).unwrap_or(0)
}

/// Pairs: bytes to the next line's instruction, difference of the lines (Objects/lnotab_notes.txt of 3.9).
fn lnotab(table: &[u8], is_whole: bool, first_line: i64, instruction: u64) -> Option<i64> {
    let (mut begin, mut line) = (0, first_line);
    for pair in table.chunks_exact(2) {
        begin += u64::from(pair[0]);
        if begin > instruction {
            return Some(line);
        }
        line += i64::from(pair[1] as i8);
    }
    is_whole.then_some(line)
}

/// Pairs: bytes of a range, difference of its line; -128 = the range has none (Objects/lnotab_notes.txt of 3.10).
fn ranges(table: &[u8], first_line: i64, instruction: u64) -> Option<i64> {
    const NO_LINE: i8 = -128;
    let (mut end, mut line) = (0, first_line);
    for pair in table.chunks_exact(2) {
        let difference = pair[1] as i8;
        if difference != NO_LINE {
            line += i64::from(difference);
        }
        end += u64::from(pair[0]);
        if instruction < end {
            return (difference != NO_LINE).then_some(line);
        }
    }
    None
}

/// Entries that begin with a byte whose top bit is set: a code, and the length in units of 2 bytes (Objects/locations.md of 3.11).
fn locations(table: &[u8], first_line: i64, instruction: u64) -> Option<i64> {
    const UNIT: u64 = 2;
    let (mut at, mut end, mut line) = (0, 0, first_line);
    while let Some(&first) = table.get(at) {
        if first & 0x80 == 0 {
            return None;
        }
        let code = first >> 3 & 15;
        let rest = table.get(at + 1..)?;
        let has_line = match code {
            15 => false,
            13 | 14 => {
                line = line.checked_add(signed(rest)?)?;
                true
            }
            10..=12 => {
                line += i64::from(code - 10);
                true
            }
            _ => true,
        };
        end += UNIT * u64::from((first & 7) + 1);
        if instruction < end {
            return has_line.then_some(line);
        }
        at += 1 + rest.iter().take_while(|&&byte| byte & 0x80 == 0).count();
    }
    None
}

/// A signed number: 6 bits a byte, the lowest first; the lowest bit is the sign.
fn signed(bytes: &[u8]) -> Option<i64> {
    let mut value: u64 = 0;
    for (place, &byte) in bytes.iter().enumerate().take(8) {
        value |= u64::from(byte & 63) << (6 * place);
        if byte & 64 == 0 {
            let magnitude = i64::try_from(value >> 1).ok()?;
            return Some(if value & 1 != 0 { -magnitude } else { magnitude });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_3_9_hold_up_to_the_next_pair() {
        let table = [6, 1, 50, 1, 10, 0xfe];
        let lines = [-1, 0, 5, 6, 55, 56, 65, 66, 1000].map(|at| line_of(LineFormat::Lnotab, &table, true, 10, at));
        assert_eq!(lines, [10, 10, 10, 11, 11, 12, 12, 10, 10]);
        // The last line of a table that was cut may have ended.
        assert_eq!([55, 66].map(|at| line_of(LineFormat::Lnotab, &table, false, 10, at)), [11, 0]);
    }

    #[test]
    fn ranges_of_3_10_may_have_no_line() {
        let table = [4, 0, 2, 0x80, 6, 3];
        let lines = [-2, 0, 3, 4, 6, 11, 12].map(|at| line_of(LineFormat::Ranges, &table, true, 10, at));
        assert_eq!(lines, [10, 10, 10, 0, 13, 13, 0]);
    }

    #[test]
    fn locations_of_every_form_are_read() {
        // Short; one line further; long with a difference of -3; without columns +70; none.
        let table = [0x80, 0x12, 0x80 | 11 << 3 | 1, 1, 2, 0x80 | 14 << 3, 7, 0, 1, 1, 0x80 | 13 << 3, 64 | 12, 2, 0x80 | 15 << 3];
        let lines = [-1, 0, 2, 5, 6, 8, 10, 12].map(|at| line_of(LineFormat::Locations, &table, true, 10, at));
        assert_eq!(lines, [10, 10, 11, 11, 8, 78, 0, 0]);
    }

    #[test]
    fn no_table_makes_a_reader_fail() {
        for format in [LineFormat::Lnotab, LineFormat::Ranges, LineFormat::Locations] {
            for byte in 0..=255 {
                for length in 0..20 {
                    let _ = line_of(format, &vec![byte; length], true, u32::MAX, i64::MAX);
                    let _ = line_of(format, &vec![byte; length], false, 0, 30);
                }
            }
        }
    }
}
