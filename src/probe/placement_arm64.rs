//! Chooses the instruction of a function that is probed on arm64: always the first.
//!
//! The kernel simulates `b`, `bl`, `b.cond`, `cbz`, `cbnz`, `tbz`, `tbnz`, `adr`, `adrp`, `br`, `blr` and `ret`
//! (arch/arm64/kernel/probes/decode-insn.c, `arm_probe_decode_insn`), newer kernels also `nop`, and single-steps a copy of any other.
//! Moving the probe forward to one of these, as on x86-64, would be cheaper if it comes early; but a return probe replaces x30, so its site
//! must precede the instruction that signs (`paciasp`) or saves x30 (`stp x29, x30`), with which most functions begin. So the site is the
//! entry: every argument is in its own register there, and nothing can jump past it.

use super::flow::{Flow, flow_at, is_idle_hint, word_of};
use super::placement::{Jump, Placement, Reason};
use crate::allocator::functions::Shape;
use crate::machine::Machine;
use crate::machine::register::argument_register;

/// The place of a probe in the function at `entry`, whose first bytes are `code`.
#[must_use]
pub fn place(code: &[u8], entry: u64, shape: Shape) -> Placement {
    let register = |index: Option<u8>| index.and_then(argument_register);
    let word = word_of(code);
    // Checks for a function that only jumps to another one.
    let skipped = usize::from(word.is_some_and(is_idle_hint)) * 4;
    let flow = code.get(skipped..).map_or(Flow::Unknown, |code| flow_at(Machine::Aarch64, code, entry.wrapping_add(skipped as u64)));
    let jump = match flow {
        Flow::Jump(target) => Some(Jump::with_arguments(target, shape)),
        _ => None,
    };
    Placement {
        offset: 0,
        instruction: word.map_or_else(|| "(bad)".into(), text),
        reason: if word.is_some_and(is_simulated) { Reason::Emulated } else { Reason::AlwaysEntry },
        size: register(shape.size),
        count: register(shape.count),
        pointer: register(shape.pointer),
        sp_words: 0,
        has_return: shape.op.needs_return(),
        jump,
    }
}

/// Whether every kernel simulates it.
fn is_simulated(word: u32) -> bool {
    let is_adr = word & 0x1f00_0000 == 0x1000_0000;
    // br, blr, ret
    let is_register_branch = matches!(word & 0xffff_fc1f, 0xd61f_0000 | 0xd63f_0000 | 0xd65f_0000);
    is_adr
        || is_register_branch
        || matches!(flow_at(Machine::Aarch64, &word.to_le_bytes(), 0), Flow::Branch { .. } | Flow::Jump(_) | Flow::Call { .. })
}

/// The instruction for display: those with which functions usually begin by name, others as a number.
fn text(word: u32) -> String {
    let name = match word {
        0xd503_201f => "nop",
        0xd503_245f => "bti c",
        0xd503_233f => "paciasp",
        0xd503_237f => "pacibsp",
        _ if word & 0xffc0_7fff == 0xa980_7bfd => "stp x29, x30, [sp, …]!",
        _ if word & 0xff00_03ff == 0xd100_03ff => "sub sp, sp, …",
        _ if word & 0x7f00_0000 == 0x3400_0000 => "cbz …",
        _ if word & 0x7f00_0000 == 0x3500_0000 => "cbnz …",
        _ if word & 0xfc00_0000 == 0x1400_0000 => "b …",
        _ => return format!(".inst {word:#010x}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::allocator::functions::Op;

    const SHAPE: Shape = Shape { op: Op::Alloc, size: Some(1), count: Some(0), pointer: None, is_aligned: false };

    fn place_words(words: &[u32]) -> Placement {
        let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        place(&code, 0x4000, SHAPE)
    }

    #[test]
    fn the_site_is_always_the_entry() {
        for (words, reason, text) in [
            (&[0xd503_233f_u32, 0xa9be_7bfd][..], Reason::AlwaysEntry, "paciasp"),
            (&[0xa9be_7bfd], Reason::AlwaysEntry, "stp x29, x30, [sp, …]!"),
            (&[0xb400_0080, 0xa9be_7bfd], Reason::Emulated, "cbz …"),
            (&[0xd503_245f, 0xb400_0080], Reason::AlwaysEntry, "bti c"),
            (&[0xf940_0001], Reason::AlwaysEntry, ".inst 0xf9400001"),
            (&[], Reason::AlwaysEntry, "(bad)"),
        ] {
            let placement = place_words(words);
            assert_eq!((placement.offset, placement.reason, placement.instruction.as_str()), (0, reason, text));
            assert_eq!((placement.sp_words, placement.has_return, placement.jump), (0, true, None));
        }
    }

    #[test]
    fn a_function_that_only_jumps_is_recognised_after_a_landing_pad_too() {
        assert!(place_words(&[0x1400_0004]).jump.is_some_and(|jump| jump.target == 0x4010 && jump.passes_on(SHAPE)));
        assert!(place_words(&[0xd503_245f, 0x1400_0004]).jump.is_some_and(|jump| jump.target == 0x4014));
        assert!(!place_words(&[0x1400_0004]).jump.is_some_and(|jump| jump.passes_on(Shape { size: Some(2), ..SHAPE })));
    }
}
