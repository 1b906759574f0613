//! One unwind rule in 8 bytes: `struct fp_rule` of `bpf/unwind_table.h`.
//!
//! ```text
//!   higher addresses
//!   ┌──────────────────┐
//!   │ caller's frame   │
//!   ├──────────────────┤ ← CFA: the caller's rsp after the return
//!   │ return address   │   CFA - 8
//!   │ saved rbp        │   CFA + 8 * bp_slot (bp_slot = -2 here)
//!   │ locals           │
//!   ├──────────────────┤ ← rsp
//! ```

use gimli::{CfaRule, EndianSlice, LittleEndian, Register, RegisterRule, UnwindSection, UnwindTableRow};

use super::expression::{self, Form};

/// DWARF number of rbp.
pub const RBP: u8 = 6;
/// DWARF number of rsp.
pub const RSP: u8 = 7;
/// DWARF number of the return address's column.
pub const RA: u16 = 16;

/// How the canonical frame address is found. Numbers are `enum fp_cfa`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cfa {
    /// `reg + offset`
    Register {
        /// DWARF number, below 16.
        reg: u8,
        /// Bytes.
        offset: i32,
    },
    /// `*(reg + offset) + add`
    Deref {
        /// DWARF number, below 16.
        reg: u8,
        /// Bytes.
        offset: i16,
        /// Bytes.
        add: i16,
    },
    /// `*(reg + 8 * index + offset) + add`
    DerefIndex {
        /// DWARF number, below 16.
        reg: u8,
        /// DWARF number, below 16.
        index: u8,
        /// Bytes.
        offset: i16,
        /// Bytes.
        add: i16,
    },
    /// `rsp + 8`, and 8 more from byte `pushed_from` of a 16-byte PLT entry on.
    Plt {
        /// Offset in the entry of the first instruction after the push.
        pushed_from: u8,
    },
    /// A signal trampoline: the interrupted registers lie at rsp.
    Signal,
    /// The outermost frame.
    End,
    /// A form that is not evaluated.
    Unsupported,
}

/// Where the caller's rbp is. Numbers are `enum fp_saved_bp`. Slots are in words of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SavedBp {
    /// Still in rbp.
    Same,
    /// At CFA + 8 * slot.
    AtCfa(i8),
    /// At rbp + 8 * slot.
    AtBp(i8),
    /// At rsp + 8 * slot.
    AtSp(i8),
    /// Nowhere that could be told.
    Lost,
}

/// Where the return address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SavedRa {
    /// At CFA - 8.
    AtCfa,
    /// In this register.
    InRegister(u8),
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Of the canonical frame address.
    pub cfa: Cfa,
    /// Of rbp.
    pub bp: SavedBp,
    /// Of the return address.
    pub ra: SavedRa,
}

impl Rule {
    /// A rule of a form that is not evaluated.
    pub const UNSUPPORTED: Self = Self::only(Cfa::Unsupported);
    /// The interrupted registers lie at rsp.
    pub const SIGNAL: Self = Self::only(Cfa::Signal);
    /// The outermost frame.
    pub const END: Self = Self::only(Cfa::End);

    const fn only(cfa: Cfa) -> Self {
        Self { cfa, bp: SavedBp::Same, ra: SavedRa::AtCfa }
    }

    /// The 8 bytes as the unwinder reads them. Never 0.
    #[must_use]
    pub fn pack(self) -> u64 {
        let pair = |offset: i16, add: i16| u32::from(offset.cast_unsigned()) | u32::from(add.cast_unsigned()) << 16;
        let (kind, reg, mut reg2, word) = match self.cfa {
            Cfa::Register { reg, offset } => (1, reg, 0, offset.cast_unsigned()),
            Cfa::Deref { reg, offset, add } => (2, reg, 0, pair(offset, add)),
            Cfa::DerefIndex { reg, index, offset, add } => (3, reg, index, pair(offset, add)),
            Cfa::Plt { pushed_from } => (4, 0, 0, u32::from(pushed_from)),
            Cfa::Signal => (5, 0, 0, 0),
            Cfa::End => (6, 0, 0, 0),
            Cfa::Unsupported => (7, 0, 0, 0),
        };
        let (bp, slot) = match self.bp {
            SavedBp::Same => (0, 0),
            SavedBp::AtCfa(slot) => (1, slot),
            SavedBp::AtBp(slot) => (2, slot),
            SavedBp::AtSp(slot) => (3, slot),
            SavedBp::Lost => (4, 0),
        };
        let ra = match self.ra {
            SavedRa::AtCfa => 0u8,
            SavedRa::InRegister(reg) => {
                reg2 = reg;
                1
            }
        };
        u64::from_le_bytes([
            kind,
            (reg & 15) | (reg2 & 15) << 4,
            bp | ra << 4,
            slot.cast_unsigned(),
            word.to_le_bytes()[0],
            word.to_le_bytes()[1],
            word.to_le_bytes()[2],
            word.to_le_bytes()[3],
        ])
    }

    /// The rule of a row. `section` holds the row's expressions.
    pub fn from_row<'a, S>(row: &UnwindTableRow<usize>, section: &S) -> Self
    where
        S: UnwindSection<EndianSlice<'a, LittleEndian>>,
    {
        let ra = match row.register(Register(RA)) {
            Some(RegisterRule::Undefined) => return Self::END,
            Some(RegisterRule::Offset(-8)) => SavedRa::AtCfa,
            Some(RegisterRule::Register(register)) => match u8::try_from(register.0) {
                Ok(reg) if reg < 16 => SavedRa::InRegister(reg),
                _ => return Self::UNSUPPORTED,
            },
            _ => return Self::UNSUPPORTED,
        };
        let Some(cfa) = cfa_of(row.cfa(), section) else { return Self::UNSUPPORTED };
        if matches!((cfa, ra), (Cfa::DerefIndex { .. }, SavedRa::InRegister(_))) {
            return Self::UNSUPPORTED; // both would need the one field
        }
        let bp = match row.register(Register(u16::from(RBP))) {
            None | Some(RegisterRule::SameValue) => SavedBp::Same,
            Some(RegisterRule::Offset(offset)) => slot(offset).map_or(SavedBp::Lost, SavedBp::AtCfa),
            Some(RegisterRule::Expression(expression)) => match expression::form(expression.get(section)) {
                Some(Form::Register { reg: RBP, offset }) => slot(offset.into()).map_or(SavedBp::Lost, SavedBp::AtBp),
                Some(Form::Register { reg: RSP, offset }) => slot(offset.into()).map_or(SavedBp::Lost, SavedBp::AtSp),
                _ => SavedBp::Lost,
            },
            Some(_) => SavedBp::Lost,
        };
        Self { cfa, bp, ra }
    }
}

fn cfa_of<'a, S>(rule: &CfaRule<usize>, section: &S) -> Option<Cfa>
where
    S: UnwindSection<EndianSlice<'a, LittleEndian>>,
{
    Some(match rule {
        CfaRule::RegisterAndOffset { register, offset } => {
            Cfa::Register { reg: u8::try_from(register.0).ok().filter(|&reg| reg < 16)?, offset: i32::try_from(*offset).ok()? }
        }
        CfaRule::Expression(expression) => match expression::form(expression.get(section))? {
            Form::Register { reg, offset } => Cfa::Register { reg, offset },
            Form::Deref { reg, offset, add } => Cfa::Deref { reg, offset: i16::try_from(offset).ok()?, add: i16::try_from(add).ok()? },
            Form::DerefIndex { reg, index, offset, add } => {
                Cfa::DerefIndex { reg, index, offset: i16::try_from(offset).ok()?, add: i16::try_from(add).ok()? }
            }
            Form::Plt { pushed_from } => Cfa::Plt { pushed_from },
        },
    })
}

/// Byte offset to words; `None` if it is not whole or too far.
fn slot(offset: i64) -> Option<i8> {
    (offset % 8 == 0).then_some(())?;
    i8::try_from(offset / 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_packed_as_the_c_struct_lays_it_out() {
        let rule = Rule { cfa: Cfa::Register { reg: RSP, offset: -2 }, bp: SavedBp::AtCfa(-2), ra: SavedRa::AtCfa };
        assert_eq!(rule.pack().to_le_bytes(), [1, 7, 1, 0xfe, 0xfe, 0xff, 0xff, 0xff]);
        let rule = Rule { cfa: Cfa::Deref { reg: RBP, offset: -8, add: 0 }, bp: SavedBp::AtBp(0), ra: SavedRa::AtCfa };
        assert_eq!(rule.pack().to_le_bytes(), [2, 6, 2, 0, 0xf8, 0xff, 0, 0]);
        let rule = Rule { cfa: Cfa::Register { reg: RSP, offset: 0 }, bp: SavedBp::Same, ra: SavedRa::InRegister(5) };
        assert_eq!(rule.pack().to_le_bytes(), [1, 0x57, 0x10, 0, 0, 0, 0, 0]);
        assert_eq!(Rule::END.pack(), 6);
    }

    #[test]
    fn only_whole_near_words_are_slots() {
        assert_eq!(slot(-16), Some(-2));
        assert_eq!(slot(-1024), Some(-128));
        assert_eq!(slot(-1032), None);
        assert_eq!(slot(-12), None);
    }
}
