//! Operands of probes as compilers write them for arm64.
//!
//! `x3`, `w3`; a constant without a prefix; `[x29, -8]`, `[sp]`, `[x1, x2]`, `[x1, x2, lsl 3]`, offsets with or without `#`.

use crate::emitter::usdt::{Operand, number};
use crate::machine::register::Register;

/// DWARF number of the stack pointer.
const SP: u8 = 31;

pub(super) fn operand(text: &str) -> Option<Operand> {
    if let Some(inside) = text.strip_prefix('[') {
        return memory(inside.strip_suffix(']')?);
    }
    if matches!(text, "xzr" | "wzr") {
        return Some(Operand::Constant(0));
    }
    if let Some(register) = register(text, &["x", "w"]) {
        return Some(Operand::Register { register, high_byte: false });
    }
    constant(text).map(Operand::Constant)
}

fn memory(inside: &str) -> Option<Operand> {
    let mut parts = inside.split(',').map(str::trim);
    let base = Some(register(parts.next()?, &["x"])?);
    let (displacement, index) = match (parts.next(), parts.next(), parts.next()) {
        (None, None, None) => (0, None),
        (Some(second), None, None) => match register(second, &["x"]) {
            // Register 31 cannot be an index.
            Some(Register(SP)) => return None,
            Some(index) => (0, Some((index, 0))),
            None => (constant(second)?, None),
        },
        (Some(second), Some(shift), None) => {
            let index = register(second, &["x"]).filter(|index| index.0 != SP)?;
            let shift = u8::try_from(constant(shift.strip_prefix("lsl ")?.trim_start())?).ok().filter(|&shift| shift <= 3)?;
            (0, Some((index, shift)))
        }
        _ => return None,
    };
    Some(Operand::Memory { displacement, base, index })
}

fn constant(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('#').unwrap_or(text);
    number(digits).filter(|_| digits.ends_with(|c: char| c.is_ascii_hexdigit()))
}

/// A general-purpose register by a name that begins with one of these letters.
fn register(name: &str, letters: &[&str]) -> Option<Register> {
    match name {
        "sp" => return Some(Register(SP)),
        "wsp" => return None,
        _ => {}
    }
    let digits = letters.iter().find_map(|letter| name.strip_prefix(letter))?;
    let number: u8 = digits.parse().ok().filter(|&number| number <= 30)?;
    // Rejects "x08".
    (digits == number.to_string()).then_some(Register(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_operand_that_compilers_emit_is_read() {
        let memory = |displacement, base, index| Some(Operand::Memory { displacement, base: Some(Register(base)), index });
        let plain = |n| Some(Operand::Register { register: Register(n), high_byte: false });
        assert_eq!(operand("x0"), plain(0));
        assert_eq!(operand("w30"), plain(30));
        assert_eq!(operand("sp"), plain(31));
        assert_eq!(operand("xzr"), Some(Operand::Constant(0)));
        assert_eq!(operand("[sp, 16]"), memory(16, 31, None));
        assert_eq!(operand("[x29, -8]"), memory(-8, 29, None));
        assert_eq!(operand("[x29,#-8]"), memory(-8, 29, None));
        assert_eq!(operand("[sp]"), memory(0, 31, None));
        assert_eq!(operand("[x1, x2]"), memory(0, 1, Some((Register(2), 0))));
        assert_eq!(operand("[x1, x2, lsl 3]"), memory(0, 1, Some((Register(2), 3))));
        assert_eq!(operand("-1"), Some(Operand::Constant(-1)));
        assert_eq!(operand("0x10"), Some(Operand::Constant(16)));
    }

    #[test]
    fn unsupported_operands_are_refused() {
        for text in [
            "",
            "[",
            "[]",
            "x31",
            "x08",
            "v0",
            "[w0]",
            "[x0, 8]!",
            "[x0], 8",
            "[x1, x2, lsl 4]",
            "[x1, w2, sxtw 3]",
            "[x1, sp]",
            "[x0, :lo12:a]",
            "symbol",
            "wsp",
            "$5",
            "%rax",
        ] {
            assert_eq!(operand(text), None, "{text}");
        }
    }
}
