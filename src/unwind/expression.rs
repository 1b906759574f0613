//! The DWARF expressions that occur in unwind rows, recognised by their shape.
//!
//! Compilers and assemblers write four shapes (0.14 % of a distribution's rows have an expression at all):
//!
//! | shape | written by |
//! |---|---|
//! | `breg` | realigned stacks: where rbp was saved |
//! | `breg deref [plus]` | realigned stacks: the CFA was saved in the frame |
//! | `breg breg lit8 mul plus deref plus` | OpenSSL's assembly: the stack pointer was saved in an array on the stack |
//! | `breg7 8; breg16 0; lit15; and; litN; ge; lit3; shl; plus` | PLT entries, by the linker |

use gimli::{Encoding, EndianSlice, Expression, Format, LittleEndian, Operation, Register};

/// An expression's meaning. Registers are DWARF numbers below 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `reg + offset`
    Register {
        /// The register.
        reg: u8,
        /// Bytes.
        offset: i32,
    },
    /// `*(reg + offset) + add`
    Deref {
        /// The register.
        reg: u8,
        /// Bytes.
        offset: i32,
        /// Bytes.
        add: i32,
    },
    /// `*(reg + 8 * index + offset) + add`
    DerefIndex {
        /// The register.
        reg: u8,
        /// The other register.
        index: u8,
        /// Bytes.
        offset: i32,
        /// Bytes.
        add: i32,
    },
    /// `rsp + 8 + ((rip & 15) >= pushed_from) * 8`
    Plt {
        /// Byte of the entry.
        pushed_from: u8,
    },
}

/// All general-purpose registers of every machine have numbers below this.
const REGISTERS: u8 = 64;
/// Number of operations of the longest known shape (PLT).
const OPERATIONS_MAX: usize = 9;

/// What the expression computes; `None` if its shape is not a known one.
#[must_use]
pub fn form(expression: gimli::Result<Expression<EndianSlice<'_, LittleEndian>>>) -> Option<Form> {
    let encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };
    let mut operations = expression.ok()?.operations(encoding);
    let mut found = [Op::Other; OPERATIONS_MAX];
    let mut len = 0;
    while let Some(operation) = operations.next().ok()? {
        *found.get_mut(len)? = Op::from(operation);
        len += 1;
    }
    match *found.get(..len)? {
        [Op::Breg(reg, offset)] => Some(Form::Register { reg, offset: i32::try_from(offset).ok()? }),
        [Op::Breg(reg, offset), Op::Deref] => deref(reg, offset, 0),
        [Op::Breg(reg, offset), Op::Deref, Op::PlusConstant(add)] | [Op::Breg(reg, offset), Op::Deref, Op::Literal(add), Op::Plus] => {
            deref(reg, offset, add)
        }
        [Op::Breg(reg, offset), Op::Breg(index, 0), Op::Literal(8), Op::Mul, Op::Plus, Op::Deref, Op::PlusConstant(add)] => {
            Some(Form::DerefIndex { reg, index, offset: i32::try_from(offset).ok()?, add: i32::try_from(add).ok()? })
        }
        [
            Op::Breg(7, 8),
            Op::Breg(16, 0),
            Op::Literal(15),
            Op::And,
            Op::Literal(pushed_from),
            Op::Ge,
            Op::Literal(3),
            Op::Shl,
            Op::Plus,
        ] => Some(Form::Plt { pushed_from: u8::try_from(pushed_from).ok().filter(|&byte| byte < 16)? }),
        _ => None,
    }
}

fn deref(reg: u8, offset: i64, add: i64) -> Option<Form> {
    Some(Form::Deref { reg, offset: i32::try_from(offset).ok()?, add: i32::try_from(add).ok()? })
}

/// The operations that the known shapes are made of.
#[derive(Debug, Clone, Copy)]
enum Op {
    Breg(u8, i64),
    Deref,
    Literal(i64),
    PlusConstant(i64),
    Plus,
    Mul,
    And,
    Ge,
    Shl,
    Other,
}

impl<'a> From<Operation<EndianSlice<'a, LittleEndian>>> for Op {
    fn from(operation: Operation<EndianSlice<'a, LittleEndian>>) -> Self {
        match operation {
            Operation::RegisterOffset { register: Register(register), offset, .. } => u8::try_from(register)
                .ok()
                .filter(|&register| register < REGISTERS)
                .map_or(Self::Other, |register| Self::Breg(register, offset)),
            Operation::Deref { size: 8, space: false, .. } => Self::Deref,
            Operation::UnsignedConstant { value } => i64::try_from(value).map_or(Self::Other, Self::Literal),
            Operation::SignedConstant { value } => Self::Literal(value),
            Operation::PlusConstant { value } => i64::try_from(value).map_or(Self::Other, Self::PlusConstant),
            Operation::Plus => Self::Plus,
            Operation::Mul => Self::Mul,
            Operation::And => Self::And,
            Operation::Ge => Self::Ge,
            Operation::Shl => Self::Shl,
            _ => Self::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(bytes: &[u8]) -> Option<Form> {
        form(Ok(Expression(EndianSlice::new(bytes, LittleEndian))))
    }

    #[test]
    fn the_linkers_plt_expression_is_recognised_with_either_entry_layout() {
        // As ld writes it for .plt (11) and for .plt with IBT (10).
        assert_eq!(of(&[0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22]), Some(Form::Plt { pushed_from: 11 }));
        assert_eq!(of(&[0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3a, 0x2a, 0x33, 0x24, 0x22]), Some(Form::Plt { pushed_from: 10 }));
    }

    #[test]
    fn gccs_realigned_frames_are_recognised() {
        // DW_OP_breg6 -8; deref, and DW_OP_breg6 0.
        assert_eq!(of(&[0x76, 0x78, 0x06]), Some(Form::Deref { reg: 6, offset: -8, add: 0 }));
        assert_eq!(of(&[0x76, 0]), Some(Form::Register { reg: 6, offset: 0 }));
    }

    #[test]
    fn openssls_saved_stack_pointers_are_recognised() {
        // DW_OP_breg7 64; deref; plus_uconst 8, and the form with an index.
        assert_eq!(of(&[0x77, 0xc0, 0x00, 0x06, 0x23, 0x08]), Some(Form::Deref { reg: 7, offset: 64, add: 8 }));
        assert_eq!(
            of(&[0x77, 8, 0x79, 0, 0x38, 0x1e, 0x22, 0x06, 0x23, 0x08]),
            Some(Form::DerefIndex { reg: 7, index: 9, offset: 8, add: 8 })
        );
    }

    #[test]
    fn other_and_broken_expressions_are_refused() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[0x77]), None, "truncated");
        assert_eq!(of(&[0x30]), None, "a constant");
        assert_eq!(of(&[0x30; 40]), None, "too long");
        assert_eq!(of(&[0x92, 64, 0]), None, "register 64 is not a general-purpose one");
    }
}
