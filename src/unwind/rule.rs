//! One unwind rule in 8 bytes ([`bpf::Rule`]).
//!
//! ```text
//!   higher addresses
//!   ┌──────────────────┐
//!   │ caller's frame   │
//!   ├──────────────────┤ ← CFA: the caller's sp after the return        arm64: the return address is in x30 until
//!   │ return address   │   CFA - 8                                      a function saves it, anywhere in its frame
//!   │ saved rbp        │   CFA + 8 * bp_slot (bp_slot = -2 here)        but nearly always in the word above x29
//!   │ locals           │
//!   ├──────────────────┤ ← sp
//! ```
//!
//! "bp" is the frame pointer (rbp, x29), "sp" the stack pointer. Registers in rules are [`Machine::rule_code`]s, not DWARF numbers.

use gimli::{CfaRule, EndianSlice, LittleEndian, Register, RegisterRule, UnwindSection, UnwindTableRow};

use super::expression::{self, Form};
use crate::bpf;
use crate::machine::Machine;

/// The code of the frame pointer.
pub const BP: u8 = bpf::REG_BP as u8;
/// The code of the stack pointer.
pub const SP: u8 = bpf::REG_SP as u8;

/// How the canonical frame address is determined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Cfa {
    /// `reg + offset`
    Register {
        /// Its code, below 16.
        reg: u8,
        /// Bytes.
        offset: i32,
    },
    /// `*(reg + offset) + add`
    Deref {
        /// Its code, below 16.
        reg: u8,
        /// Bytes.
        offset: i16,
        /// Bytes.
        add: i16,
    },
    /// `*(reg + 8 * index + offset) + add`
    DerefIndex {
        /// Its code, below 16.
        reg: u8,
        /// Its code, below 16.
        index: u8,
        /// Bytes.
        offset: i16,
        /// Bytes.
        add: i16,
    },
    /// x86-64: `rsp + 8`, and 8 more from byte `pushed_from` of a 16-byte PLT entry on.
    Plt {
        /// Offset in the entry of the first instruction after the push.
        pushed_from: u8,
    },
    /// A signal trampoline: the interrupted registers are at sp.
    Signal,
    /// The outermost frame.
    End,
    /// A form that is not evaluated.
    Unsupported,
}

/// Where the caller's bp is. Slots are in words of 8 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SavedBp {
    /// Still in bp.
    Same,
    /// At CFA + 8 * slot.
    AtCfa(i8),
    /// At bp + 8 * slot.
    AtBp(i8),
    /// At sp + 8 * slot.
    AtSp(i8),
    /// Not known.
    Lost,
}

/// Where the return address is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SavedRa {
    /// At CFA - 8. Only x86-64.
    AtCfa,
    /// In the register with this code.
    InRegister(u8),
    /// In the word above the caller's bp. Only arm64.
    BesideBp,
    /// At CFA + 8 * slot, while bp is in no slot. Only arm64.
    AtSlot(i8),
    /// At the register that defines the CFA, + 8 * slot, while bp is in no slot. Only arm64.
    AtRegister(i8),
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Of the canonical frame address.
    pub cfa: Cfa,
    /// Of bp.
    pub bp: SavedBp,
    /// Of the return address.
    pub ra: SavedRa,
}

impl Rule {
    /// A rule of a form that is not evaluated.
    pub const UNSUPPORTED: Self = Self::only(Cfa::Unsupported);
    /// The interrupted registers are at sp.
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
        let (cfa, reg, mut reg2, word) = match self.cfa {
            Cfa::Register { reg, offset } => (bpf::Cfa::Register, reg, 0, offset.cast_unsigned()),
            Cfa::Deref { reg, offset, add } => (bpf::Cfa::Deref, reg, 0, pair(offset, add)),
            Cfa::DerefIndex { reg, index, offset, add } => (bpf::Cfa::DerefIndex, reg, index, pair(offset, add)),
            Cfa::Plt { pushed_from } => (bpf::Cfa::Plt, 0, 0, u32::from(pushed_from)),
            Cfa::Signal => (bpf::Cfa::Signal, 0, 0, 0),
            Cfa::End => (bpf::Cfa::End, 0, 0, 0),
            Cfa::Unsupported => (bpf::Cfa::Unsupported, 0, 0, 0),
        };
        let (bp, mut bp_slot) = match self.bp {
            SavedBp::Same => (bpf::SavedBp::Same, 0),
            SavedBp::AtCfa(slot) => (bpf::SavedBp::AtCfa, slot),
            SavedBp::AtBp(slot) => (bpf::SavedBp::AtBp, slot),
            SavedBp::AtSp(slot) => (bpf::SavedBp::AtSp, slot),
            SavedBp::Lost => (bpf::SavedBp::Lost, 0),
        };
        let ra = match self.ra {
            SavedRa::AtCfa => bpf::SavedRa::AtCfa,
            SavedRa::InRegister(reg) => {
                reg2 = reg;
                bpf::SavedRa::InRegister
            }
            SavedRa::BesideBp => bpf::SavedRa::BesideBp,
            SavedRa::AtSlot(slot) => {
                bp_slot = slot;
                bpf::SavedRa::AtSlot
            }
            SavedRa::AtRegister(slot) => {
                bp_slot = slot;
                bpf::SavedRa::AtReg
            }
        };
        let registers = (reg & 15) | (reg2 & 15) << 4;
        let saved = bp as u8 | (ra as u8) << 4;
        zerocopy::transmute!(bpf::Rule { cfa: cfa as u8, registers, saved, bp_slot, offset: word.to_le_bytes() })
    }

    /// The rule of a row. `section` holds the row's expressions.
    pub fn from_row<'a, S>(row: &UnwindTableRow<usize>, section: &S, machine: Machine) -> Self
    where
        S: UnwindSection<EndianSlice<'a, LittleEndian>>,
    {
        let Some(cfa) = cfa_of(row.cfa(), section, machine) else {
            let ends = matches!(row.register(Register(machine.return_address())), Some(RegisterRule::Undefined));
            return if ends { Self::END } else { Self::UNSUPPORTED };
        };
        let bp_rule = row.register(Register(machine.frame_pointer()));
        let bp = bp_of(bp_rule.as_ref(), cfa, section, machine);
        let (ra, bp) = match (machine, row.register(Register(machine.return_address()))) {
            (_, Some(RegisterRule::Undefined)) => return Self::END,
            (Machine::X86_64, Some(RegisterRule::Offset(-8))) => (SavedRa::AtCfa, bp),
            (_, Some(RegisterRule::Register(register))) => match machine.rule_code(register.0) {
                Some(code) => (SavedRa::InRegister(code), bp),
                None => return Self::UNSUPPORTED,
            },
            (Machine::Aarch64, None | Some(RegisterRule::SameValue)) => match machine.rule_code(machine.return_address()) {
                Some(code) => (SavedRa::InRegister(code), bp),
                None => return Self::UNSUPPORTED,
            },
            (Machine::Aarch64, Some(RegisterRule::Offset(offset))) => match (bp_rule, slot(offset)) {
                (Some(RegisterRule::Offset(bp_offset)), _) if bp != SavedBp::Lost && bp_offset.checked_add(8) == Some(offset) => {
                    (SavedRa::BesideBp, bp)
                }
                // There is one slot, and a walk can continue without bp as long as no caller needs it.
                (_, Some(ra_slot)) => (SavedRa::AtSlot(ra_slot), same_or_lost(bp)),
                (_, None) => match far_slot(offset, cfa) {
                    Some((_, ra_slot)) => (SavedRa::AtRegister(ra_slot), same_or_lost(bp)),
                    None => return Self::UNSUPPORTED,
                },
            },
            _ => return Self::UNSUPPORTED,
        };
        if matches!((cfa, ra), (Cfa::DerefIndex { .. }, SavedRa::InRegister(_))) {
            return Self::UNSUPPORTED; // both would need the same field
        }
        Self { cfa, bp, ra }
    }
}

fn bp_of<'a, S>(rule: Option<&RegisterRule<usize>>, cfa: Cfa, section: &S, machine: Machine) -> SavedBp
where
    S: UnwindSection<EndianSlice<'a, LittleEndian>>,
{
    match rule {
        None | Some(RegisterRule::SameValue) => SavedBp::Same,
        Some(RegisterRule::Offset(offset)) => match (slot(*offset), far_slot(*offset, cfa)) {
            (Some(slot), _) => SavedBp::AtCfa(slot),
            (None, Some((SP, slot))) if machine == Machine::Aarch64 => SavedBp::AtSp(slot),
            (None, Some((BP, slot))) if machine == Machine::Aarch64 => SavedBp::AtBp(slot),
            _ => SavedBp::Lost,
        },
        Some(RegisterRule::Expression(expression)) => match expression::form(expression.get(section)) {
            Some(Form::Register { reg, offset }) => match machine.rule_code(reg.into()) {
                Some(BP) => slot(offset.into()).map_or(SavedBp::Lost, SavedBp::AtBp),
                Some(SP) => slot(offset.into()).map_or(SavedBp::Lost, SavedBp::AtSp),
                _ => SavedBp::Lost,
            },
            _ => SavedBp::Lost,
        },
        Some(_) => SavedBp::Lost,
    }
}

fn cfa_of<'a, S>(rule: &CfaRule<usize>, section: &S, machine: Machine) -> Option<Cfa>
where
    S: UnwindSection<EndianSlice<'a, LittleEndian>>,
{
    let code = |reg: u8| machine.rule_code(reg.into());
    Some(match rule {
        CfaRule::RegisterAndOffset { register, offset } => {
            Cfa::Register { reg: machine.rule_code(register.0)?, offset: i32::try_from(*offset).ok()? }
        }
        CfaRule::Expression(expression) => match expression::form(expression.get(section))? {
            Form::Register { reg, offset } => Cfa::Register { reg: code(reg)?, offset },
            Form::Deref { reg, offset, add } => {
                Cfa::Deref { reg: code(reg)?, offset: i16::try_from(offset).ok()?, add: i16::try_from(add).ok()? }
            }
            Form::DerefIndex { reg, index, offset, add } => {
                Cfa::DerefIndex { reg: code(reg)?, index: code(index)?, offset: i16::try_from(offset).ok()?, add: i16::try_from(add).ok()? }
            }
            Form::Plt { pushed_from } if machine == Machine::X86_64 => Cfa::Plt { pushed_from },
            Form::Plt { .. } => return None,
        },
    })
}

/// For a location too far from the CFA, its slot from the register that defines the CFA: arm64 saves x29 and x30 at the low end of frames
/// of any size.
fn far_slot(offset: i64, cfa: Cfa) -> Option<(u8, i8)> {
    let Cfa::Register { reg, offset: cfa_offset } = cfa else { return None };
    Some((reg, slot(offset.checked_add(cfa_offset.into())?)?))
}

fn same_or_lost(bp: SavedBp) -> SavedBp {
    if bp == SavedBp::Same { bp } else { SavedBp::Lost }
}

/// A byte offset in words; `None` if it is not a multiple of a word or too far.
fn slot(offset: i64) -> Option<i8> {
    (offset % 8 == 0).then_some(())?;
    i8::try_from(offset / 8).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_packed_as_the_c_struct_lays_it_out() {
        let rule = Rule { cfa: Cfa::Register { reg: SP, offset: -2 }, bp: SavedBp::AtCfa(-2), ra: SavedRa::AtCfa };
        assert_eq!(rule.pack().to_le_bytes(), [1, 7, 1, 0xfe, 0xfe, 0xff, 0xff, 0xff]);
        let rule = Rule { cfa: Cfa::Deref { reg: BP, offset: -8, add: 0 }, bp: SavedBp::AtBp(0), ra: SavedRa::AtCfa };
        assert_eq!(rule.pack().to_le_bytes(), [2, 6, 2, 0, 0xf8, 0xff, 0, 0]);
        let rule = Rule { cfa: Cfa::Register { reg: SP, offset: 0 }, bp: SavedBp::Same, ra: SavedRa::InRegister(5) };
        assert_eq!(rule.pack().to_le_bytes(), [1, 0x57, 0x10, 0, 0, 0, 0, 0]);
        let rule = Rule { cfa: Cfa::Register { reg: SP, offset: 32 }, bp: SavedBp::AtCfa(-4), ra: SavedRa::BesideBp };
        assert_eq!(rule.pack().to_le_bytes(), [1, 7, 0x21, 0xfc, 32, 0, 0, 0]);
        let rule = Rule { cfa: Cfa::Register { reg: SP, offset: 32 }, bp: SavedBp::Lost, ra: SavedRa::AtSlot(-2) };
        assert_eq!(rule.pack().to_le_bytes(), [1, 7, 0x34, 0xfe, 32, 0, 0, 0]);
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
