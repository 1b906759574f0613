//! `.eh_frame` or `.debug_frame` to rows: address and rule, sorted, without repetition.
//!
//! A row is valid from its address to the next row's. If a gap between functions may contain code, a row without a rule ends the function
//! before it.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use gimli::{BaseAddresses, CieOrFde, DebugFrame, EhFrame, EndianSlice, LittleEndian, UnwindContext, Vendor};

use super::Error;
use super::elf::{Format, Segment, UnwindSection};
use super::rule::Rule;
use crate::machine::Machine;

/// Maximum number of rows of a file. The largest seen has 1.2 M (LLVM); 8 M rows are 32 MiB of table, half the default budget.
pub const ROWS_MAX: usize = 8 << 20;
/// Maximum number of functions of a file, including CIEs and other entries. 1.2 M rows are of 161,000 functions.
const ENTRIES_MAX: usize = 4 << 20;
/// Maximum number of distinct rules of a file: a row has 16 bits for the number. A whole distribution has 3,884.
const RULES_MAX: usize = u16::MAX as usize;

/// The number of the empty rule: nothing is known.
pub const NO_RULE: u16 = 0;

/// A gap between functions of at most this many bytes counts as padding (functions are aligned to 16).
const GAP_BYTES_PADDING: u64 = 15;
/// In a file that may contain assembly without rows (a C library, a static program), only gaps too small for any function that can be on a
/// stack count as padding: the smallest such function, a signal trampoline, has 7 bytes.
const GAP_BYTES_PADDING_ASSEMBLY: u64 = 6;

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// First address, in the file's own address space.
    pub address: u64,
    /// Number of the rule, [`NO_RULE`] = nothing known.
    pub rule: u16,
}

/// Counts of the conversion of one file, including what it refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Functions (FDEs) converted.
    pub functions: u64,
    /// Functions outside the executable segments, with an empty or overflowing range, or of a discarded section (address 0).
    pub functions_refused: u64,
    /// Functions, or ends of functions, whose instructions are corrupt: rows read before are kept.
    pub functions_corrupt: u64,
    /// Functions that begin inside another one, which is truncated.
    pub functions_overlapping: u64,
    /// Rows read.
    pub rows_read: u64,
    /// Rows of a form that the unwinder does not evaluate.
    pub rows_unsupported: u64,
    /// Rows for whose rule there was no number left.
    pub rules_refused: u64,
    /// Sections that end in the middle of an entry: their later functions are missing.
    pub sections_corrupt: u64,
}

/// A file's rows and rules.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    /// Sorted by address, no two with the same address, no two neighbours with the same rule.
    pub rows: Vec<Row>,
    /// Packed rules by number; number 0 is [`NO_RULE`].
    pub rules: Vec<u64>,
    /// The counts of the conversion.
    pub counts: Counts,
}

/// Converts a file's unwind information. `segments` limit the valid addresses; `precise_gaps` is set for files that may contain assembly
/// without rows; `machine` determines the meaning of registers.
///
/// # Errors
/// If there are more rows than the limit. Corrupt parts are counted and skipped.
pub fn convert(section: &UnwindSection, segments: &[Segment], precise_gaps: bool, machine: Machine) -> Result<Rows, Error> {
    let bases = BaseAddresses::default().set_eh_frame(section.address).set_text(text_base(segments));
    let gap_bytes = if precise_gaps { GAP_BYTES_PADDING_ASSEMBLY } else { GAP_BYTES_PADDING };
    match section.format {
        Format::EhFrame => {
            let mut frame = EhFrame::new(&section.bytes, LittleEndian);
            frame.set_address_size(8);
            frame.set_vendor(vendor(machine));
            Converter::new(segments, machine).run(&frame, &bases, gap_bytes)
        }
        Format::DebugFrame => {
            let mut frame = DebugFrame::from(EndianSlice::new(&section.bytes, LittleEndian));
            frame.set_address_size(8);
            frame.set_vendor(vendor(machine));
            Converter::new(segments, machine).run(&frame, &bases, gap_bytes)
        }
    }
}

/// The vendor whose private instructions may occur: arm64 has one for signed return addresses.
fn vendor(machine: Machine) -> Vendor {
    match machine {
        Machine::X86_64 => Vendor::Default,
        Machine::Aarch64 => Vendor::AArch64,
    }
}

/// `DW_EH_PE_textrel` is relative to the text; no compiler uses it.
fn text_base(segments: &[Segment]) -> u64 {
    segments.iter().filter(|segment| segment.executable).map(|segment| segment.address).min().unwrap_or(0)
}

/// A function's rows, as a range of all rows in the order of the section.
#[derive(Debug, Clone, Copy)]
struct Function {
    begin: u64,
    end: u64,
    first_row: u32,
    rows: u32,
}

struct Converter<'s> {
    segments: &'s [Segment],
    machine: Machine,
    rows: Vec<Row>,
    functions: Vec<Function>,
    rules: Rules,
    counts: Counts,
}

impl<'s> Converter<'s> {
    fn new(segments: &'s [Segment], machine: Machine) -> Self {
        Self { segments, machine, rows: Vec::new(), functions: Vec::new(), rules: Rules::new(), counts: Counts::default() }
    }

    fn run<'a, S>(mut self, section: &S, bases: &BaseAddresses, gap_bytes: u64) -> Result<Rows, Error>
    where
        S: gimli::UnwindSection<EndianSlice<'a, LittleEndian>>,
        S::Offset: std::hash::Hash + Eq + Copy,
    {
        let mut context = UnwindContext::new();
        let mut cies = HashMap::new();
        let mut entries = section.entries(bases);
        for _ in 0..ENTRIES_MAX {
            let partial = match entries.next() {
                Ok(Some(CieOrFde::Fde(partial))) => partial,
                Ok(Some(CieOrFde::Cie(_))) => continue,
                Ok(None) => break,
                Err(_) => {
                    self.counts.sections_corrupt += 1;
                    break;
                }
            };
            let fde = partial.parse(|section, bases, offset| match cies.get(&offset) {
                Some(cie) => Ok(Clone::clone(cie)),
                None => {
                    let cie: gimli::CommonInformationEntry<_> = section.cie_from_offset(bases, offset)?;
                    cies.insert(offset, cie.clone());
                    Ok(cie)
                }
            });
            match fde {
                Ok(fde) => self.function(section, bases, &fde, &mut context)?,
                Err(_) => self.counts.functions_corrupt += 1,
            }
        }
        Ok(self.join(gap_bytes))
    }

    fn function<'a, S>(
        &mut self,
        section: &S,
        bases: &BaseAddresses,
        fde: &gimli::FrameDescriptionEntry<EndianSlice<'a, LittleEndian>>,
        context: &mut UnwindContext<usize>,
    ) -> Result<(), Error>
    where
        S: gimli::UnwindSection<EndianSlice<'a, LittleEndian>>,
    {
        let begin = fde.initial_address();
        let Some(end) = begin.checked_add(fde.len()).filter(|&end| begin != 0 && end > begin && self.is_text(begin, end)) else {
            self.counts.functions_refused += 1;
            return Ok(());
        };
        let too_many = Error::TooLarge { what: "unwind rows", limit: ROWS_MAX as u64 };
        let first_row = u32::try_from(self.rows.len()).map_err(|_| too_many.clone())?;
        if fde.is_signal_trampoline() {
            let rule = self.rules.number_of(Rule::SIGNAL);
            self.counts.rows_read += 1;
            self.rows.push(Row { address: begin, rule });
        } else {
            match fde.rows(section, bases, context) {
                Ok(mut table) => loop {
                    match table.next_row() {
                        Ok(Some(row)) => {
                            let address = row.start_address();
                            let rule = Rule::from_row(row, section, self.machine);
                            self.counts.rows_read += 1;
                            if rule == Rule::UNSUPPORTED {
                                self.counts.rows_unsupported += 1;
                            }
                            let rule = self.rules.number_of(rule);
                            // An instruction stream may run past its function's end, or go backwards.
                            let last = self.rows.get(first_row as usize..).and_then(<[Row]>::last);
                            if address < begin || address >= end || last.is_some_and(|last| address < last.address) {
                                self.counts.functions_corrupt += 1;
                                break;
                            }
                            if self.rows.len() >= ROWS_MAX {
                                return Err(too_many);
                            }
                            self.rows.push(Row { address, rule });
                        }
                        Ok(None) => break,
                        Err(_) => {
                            self.counts.functions_corrupt += 1;
                            break;
                        }
                    }
                },
                Err(_) => self.counts.functions_corrupt += 1,
            }
        }
        let rows = u32::try_from(self.rows.len()).map_err(|_| too_many)? - first_row;
        self.counts.functions += 1;
        self.functions.push(Function { begin, end, first_row, rows });
        Ok(())
    }

    fn is_text(&self, begin: u64, end: u64) -> bool {
        self.segments.iter().any(|segment| segment.executable && segment.contains(begin) && segment.contains(end - 1))
    }

    /// Sorts the functions by address and marks the gaps between them.
    fn join(mut self, gap_bytes: u64) -> Rows {
        self.functions.sort_by_key(|function| function.begin);
        let mut joined = Joined { rows: Vec::with_capacity(self.rows.len()) };
        for (i, function) in self.functions.iter().enumerate() {
            let next = self.functions.get(i + 1).map(|next| next.begin);
            let end = match next {
                Some(next) if next < function.end => {
                    self.counts.functions_overlapping += 1;
                    next
                }
                _ => function.end,
            };
            let rows = self.rows.get(function.first_row as usize..).and_then(|rest| rest.get(..function.rows as usize));
            for row in rows.unwrap_or_default().iter().filter(|row| row.address < end) {
                joined.push(*row);
            }
            if next.is_none_or(|next| next.saturating_sub(end) > gap_bytes) {
                joined.push(Row { address: end, rule: NO_RULE });
            }
        }
        self.counts.rules_refused = self.rules.refused;
        Rows { rows: joined.rows, rules: self.rules.packed, counts: self.counts }
    }
}

struct Joined {
    rows: Vec<Row>,
}

impl Joined {
    fn push(&mut self, row: Row) {
        if self.rows.last().is_some_and(|last| last.address == row.address) {
            self.rows.pop();
        }
        if self.rows.last().is_none_or(|last| last.rule != row.rule) {
            self.rows.push(row);
        }
    }
}

/// Assigns a number to each distinct rule.
struct Rules {
    packed: Vec<u64>,
    numbers: HashMap<u64, u16, BuildHasherDefault<Mix>>,
    refused: u64,
}

impl Rules {
    fn new() -> Self {
        Self { packed: vec![0], numbers: HashMap::default(), refused: 0 }
    }

    fn number_of(&mut self, rule: Rule) -> u16 {
        let packed = rule.pack();
        if let Some(&number) = self.numbers.get(&packed) {
            return number;
        }
        match u16::try_from(self.packed.len()) {
            Ok(number) if self.packed.len() < RULES_MAX => {
                self.packed.push(packed);
                self.numbers.insert(packed, number);
                number
            }
            _ => {
                self.refused += 1;
                NO_RULE
            }
        }
    }
}

/// A multiplicative hash: packed rules differ in few bits, and a file with deliberate collisions would only slow down its own conversion,
/// by a factor bounded by [`RULES_MAX`].
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const TEXT: Segment = Segment { offset: 0, address: 0, file_bytes: 1 << 20, executable: true };

    /// `.eh_frame` at 0x10000 as gas would write it: a CIE for x86-64 with absolute addresses, then functions with given instructions.
    fn section(functions: &[(u64, u64, &[u8])]) -> UnwindSection {
        let mut bytes = Vec::new();
        let mut entry = |body: &[u8], id: &dyn Fn(usize) -> u32| {
            let padded = body.len().next_multiple_of(8) + 4;
            let at = bytes.len();
            bytes.extend_from_slice(&u32::try_from(padded).unwrap().to_le_bytes());
            bytes.extend_from_slice(&id(at + 4).to_le_bytes());
            bytes.extend_from_slice(body);
            bytes.resize(at + 4 + padded, 0);
        };
        // Version 1, no augmentation, code alignment 1, data alignment -8, return address in 16; CFA = rsp + 8, RA at CFA - 8.
        entry(&[1, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1], &|_| 0);
        for (begin, length, instructions) in functions {
            let body = [&begin.to_le_bytes()[..], &length.to_le_bytes(), instructions].concat();
            entry(&body, &|at| u32::try_from(at).unwrap());
        }
        bytes.extend_from_slice(&[0; 4]);
        UnwindSection { format: Format::EhFrame, address: 0x10000, bytes }
    }

    fn addresses(rows: &Rows) -> Vec<(u64, bool)> {
        rows.rows.iter().map(|row| (row.address, row.rule != NO_RULE)).collect()
    }

    #[test]
    fn a_gap_that_may_hold_code_ends_the_function_before_it_and_padding_does_not() {
        let section = section(&[(0x1000, 0x10, &[]), (0x1020, 0x11, &[]), (0x1040, 0x10, &[])]);
        let rows = convert(&section, &[TEXT], false, Machine::X86_64).unwrap();
        // 16 bytes are a gap, 15 are padding; equal neighbours are one row.
        assert_eq!(addresses(&rows), [(0x1000, true), (0x1010, false), (0x1020, true), (0x1050, false)]);
        assert_eq!(rows.counts.functions, 3);
        let rows = convert(&section, &[TEXT], true, Machine::X86_64).unwrap();
        assert_eq!(addresses(&rows).len(), 6, "in a C library 15 bytes may contain a signal trampoline");
    }

    #[test]
    fn functions_out_of_order_are_sorted_and_overlapping_ones_truncated() {
        // DW_CFA_advance_loc 8, DW_CFA_def_cfa_offset 16.
        let section = section(&[(0x2000, 0x40, &[]), (0x1000, 0x20, &[0x48, 0x0e, 16]), (0x1004, 0x10, &[])]);
        let rows = convert(&section, &[TEXT], false, Machine::X86_64).unwrap();
        assert_eq!(rows.counts.functions_overlapping, 1);
        assert_eq!(addresses(&rows), [(0x1000, true), (0x1014, false), (0x2000, true), (0x2040, false)]);
    }

    #[test]
    fn functions_outside_the_text_are_refused_and_counted() {
        let text = Segment { offset: 0, address: 0x1000, file_bytes: 0x1000, executable: true };
        let section = section(&[(0, 0x10, &[]), (0x1ff8, 0x10, &[]), (u64::MAX - 4, 0x10, &[]), (0x1800, 0, &[]), (0x1100, 0x10, &[])]);
        let rows = convert(&section, &[text], false, Machine::X86_64).unwrap();
        assert_eq!((rows.counts.functions, rows.counts.functions_refused), (1, 4));
    }

    #[test]
    fn corrupt_instructions_keep_the_rows_before_them() {
        // advance 4, def_cfa_offset 16, then an opcode that does not exist.
        let section = section(&[(0x1000, 0x20, &[0x44, 0x0e, 16, 0x44, 0x3f]), (0x1100, 0x10, &[])]);
        let rows = convert(&section, &[TEXT], false, Machine::X86_64).unwrap();
        assert_eq!(rows.counts.functions_corrupt, 1);
        assert_eq!(rows.counts.functions, 2);
        assert_eq!(rows.rows.first().unwrap().address, 0x1000);
    }
}
