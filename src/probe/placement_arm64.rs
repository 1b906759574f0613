//! Chooses the instruction of a function that is probed on arm64, by the rule of [`super::placement`] for this machine.
//!
//! The kernel simulates `b`, `bl`, `b.cond`, `cbz`, `cbnz`, `tbz`, `tbnz`, `adr`, `adrp`, `br`, `blr` and `ret`
//! (arch/arm64/kernel/probes/decode-insn.c, `arm_probe_decode_insn`), newer kernels also `nop`, and single-steps a copy of any other. So the
//! site is the first one of these on the straight-line path from the entry, if at it
//!
//! 1. every argument is still in its own register;
//! 2. x30 has the return address: a return probe replaces it, so it must not have been signed (`paciasp`) or saved (`stp x29, x30`) before;
//!    of a function without one, it is only read, which neither prevents;
//! 3. x29 is the caller's, and how far sp has moved is known; under a return probe it has not moved;
//! 4. no branch leads into (entry, site].
//!
//! Otherwise it is the entry. Instructions are decoded as far as needed to tell what they write ("Arm Architecture Reference Manual", C4.1);
//! at one that is not, the path ends.

use super::flow::{Flow, flow_at, is_idle_hint, word_of};
use super::placement::{Jump, Placement, Reason};
use crate::allocator::functions::{Op, Shape};
use crate::machine::Machine;
use crate::machine::register::Register;

/// Instructions examined.
const WALK_INSTRUCTIONS_MAX: usize = 16;
/// Numbers of registers. As an operand, 31 is the stack pointer or the register that is always 0.
const FRAME_POINTER: u32 = 29;
const LINK: u32 = 30;
const STACK_POINTER: u32 = 31;

/// What an instruction that falls through does to what a probe needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Effect {
    /// Bit n = register n is written; bit 31 = the stack pointer, in a way that is not followed.
    written: u32,
    /// Bytes by which the stack pointer is lowered.
    lowers_bytes: u32,
    /// It signs x30, saves or copies it.
    uses_link: bool,
}

/// The place of a probe in the function at `entry`, whose first bytes are `code`. `is_target` as for [`super::place`].
#[must_use]
pub fn place(code: &[u8], entry: u64, shape: Shape, is_target: impl Fn(u64) -> bool) -> Placement {
    let has_return = shape.op.needs_return();
    let register = |index: Option<u8>| index.and_then(|index| Machine::Aarch64.argument_register(index)).map(Register);
    let (size, count, pointer) = (register(shape.size), register(shape.count), register(shape.pointer));
    let arguments = [size, count, pointer].into_iter().flatten().fold(0, |set, register| set | bit(register.0.into()));
    let at = |offset: u32, instruction: String, reason: Reason, sp_words: u8, jump: Option<Jump>| Placement {
        offset,
        instruction,
        reason,
        size,
        count,
        pointer,
        sp_words,
        has_return,
        jump,
    };
    let (mut chosen, mut stop, mut sp_words) = (None, Reason::NothingFound, 0u8);
    let words = code.chunks_exact(4).filter_map(word_of).take(WALK_INSTRUCTIONS_MAX);
    for (offset, word) in (0u32..).step_by(4).zip(words) {
        let vaddr = entry.wrapping_add(offset.into());
        if offset > 0 && is_target(vaddr) {
            stop = Reason::BranchInto;
            break;
        }
        if is_simulated(word) {
            let jump = match flow_at(Machine::Aarch64, &word.to_le_bytes(), vaddr) {
                Flow::Jump(target) if sp_words == 0 => Some(Jump::with_arguments(target, shape)),
                _ => None,
            };
            let reason = if chosen.is_some() { Reason::EmulatedAfterNullCheck } else { Reason::Emulated };
            let is_first = chosen.is_none();
            chosen = Some(at(offset, text(word), reason, sp_words, jump));
            // Only a null test through which other pointers fall is worth skipping: free(NULL) then costs nothing.
            if is_first && shape.op == Op::Free && pointer.is_some_and(|pointer| branches_if_zero(word, pointer)) {
                continue;
            }
            break;
        }
        match step(word, arguments, has_return).and_then(|bytes| moved(sp_words, bytes)) {
            Ok(words) => sp_words = words,
            Err(reason) => {
                stop = reason;
                break;
            }
        }
    }
    let first = || word_of(code).map_or_else(|| "(bad)".into(), text);
    chosen.unwrap_or_else(|| at(0, first(), stop, 0, None))
}

/// The bytes by which an instruction lowers the stack pointer. `Err` if the path cannot continue after it.
fn step(word: u32, arguments: u32, has_return: bool) -> Result<u32, Reason> {
    let effect = effect(word)?;
    match effect {
        _ if effect.written & arguments != 0 => Err(Reason::ArgumentLost),
        _ if effect.written & bit(LINK) != 0 || effect.uses_link && has_return => Err(Reason::ReturnAddressUsed),
        _ if effect.written & bit(FRAME_POINTER) != 0 => Err(Reason::FramePointerMoved),
        _ if effect.written & bit(STACK_POINTER) != 0 || effect.lowers_bytes > 0 && has_return => Err(Reason::StackMoved),
        _ => Ok(effect.lowers_bytes),
    }
}

/// The words between the stack pointer and where it was at the entry.
fn moved(words: u8, bytes: u32) -> Result<u8, Reason> {
    let more = u8::try_from(bytes / 8).ok().filter(|_| bytes.is_multiple_of(8));
    more.and_then(|more| words.checked_add(more)).ok_or(Reason::StackMoved)
}

fn bit(register: u32) -> u32 {
    1u32.checked_shl(register).unwrap_or(0)
}

/// The signed field of `bits` bits at bit `at`.
fn signed(word: u32, at: u32, bits: u32) -> i32 {
    (word << (32 - at - bits)).cast_signed() >> (32 - bits)
}

fn effect(word: u32) -> Result<Effect, Reason> {
    let [low, base, third] = [0, 5, 16].map(|at| word >> at & 31);
    let sets_flags = word & 1 << 29 != 0;
    // A register that may be the one that is always 0.
    let general = |register: u32| if register == 31 { 0 } else { bit(register) };
    match word {
        _ if is_idle_hint(word) => Ok(Effect::default()),
        // paciasp, pacibsp, paciaz, pacibz
        0xd503_233f | 0xd503_237f | 0xd503_231f | 0xd503_235f => Ok(Effect { uses_link: true, ..Effect::default() }),
        // sub sp, sp, #immediate, which may be shifted by 12
        _ if word & 0xff80_03ff == 0xd100_03ff => {
            Ok(Effect { lowers_bytes: (word >> 10 & 0xfff) << (12 * (word >> 22 & 1)), ..Effect::default() })
        }
        // Immediate operands: sums; and, or, exclusive or; moves; fields of bits.
        _ if matches!(word >> 23 & 0x3f, 0x22 | 0x24..=0x27) => {
            let (is_sum, is_logical) = (word >> 23 & 0x3f == 0x22, word >> 23 & 0x3f == 0x24);
            // Flags alone: cmp, cmn, tst.
            let is_sp = low == 31 && (is_sum && !sets_flags || is_logical && word >> 29 & 3 != 3);
            let reads_base = word >> 23 & 0x3f != 0x25;
            Ok(Effect {
                written: if is_sp { bit(STACK_POINTER) } else { general(low) },
                uses_link: reads_base && base == LINK,
                lowers_bytes: 0,
            })
        }
        // Register operands. A sum with an extended register may write the stack pointer.
        _ if word & 0x0e00_0000 == 0x0a00_0000 => {
            let is_extended = word & 0x1f20_0000 == 0x0b20_0000;
            let written = if low == 31 && is_extended && !sets_flags { bit(STACK_POINTER) } else { general(low) };
            Ok(Effect { written, uses_link: base == LINK || third == LINK, lowers_bytes: 0 })
        }
        // mrs
        _ if word & 0xfff0_0000 == 0xd530_0000 => Ok(Effect { written: general(low), ..Effect::default() }),
        _ if word & 0x3e00_0000 == 0x2800_0000 => pair(word),
        // ldr, str and their narrow forms, at a distance from a register that stays.
        _ if word & 0x3f00_0000 == 0x3900_0000 => {
            let is_store = word >> 22 & 3 == 0;
            Ok(if is_store {
                Effect { uses_link: low == LINK, ..Effect::default() }
            } else {
                Effect { written: general(low), ..Effect::default() }
            })
        }
        // str x, [sp, #-distance]!
        _ if word & 0xffe0_0fe0 == 0xf800_0fe0 => {
            let lowers_bytes = u32::try_from(-signed(word, 12, 9)).map_err(|_| Reason::StackMoved)?;
            Ok(Effect { lowers_bytes, uses_link: low == LINK, written: 0 })
        }
        _ if flow_at(Machine::Aarch64, &word.to_le_bytes(), 0) == Flow::Unknown => Err(Reason::ControlFlow),
        _ => Err(Reason::Undecodable),
    }
}

/// `ldp` and `stp` of general registers.
fn pair(word: u32) -> Result<Effect, Reason> {
    let [first, base, second] = [0, 5, 10].map(|at| word >> at & 31);
    let (is_load, changes_base) = (word & 1 << 22 != 0, word & 1 << 23 != 0);
    let bytes = match word >> 30 {
        0 => 4,
        2 => 8,
        // Signed words, or tags of memory.
        _ => return Err(Reason::Undecodable),
    };
    let general = |register: u32| if register == 31 { 0 } else { bit(register) };
    let mut effect = Effect { uses_link: !is_load && (first == LINK || second == LINK), ..Effect::default() };
    if is_load {
        effect.written = general(first) | general(second);
    }
    match (changes_base, signed(word, 15, 7) * bytes) {
        (true, distance) if base == STACK_POINTER && distance <= 0 => effect.lowers_bytes = distance.unsigned_abs(),
        (true, _) => effect.written |= bit(base),
        (false, _) => {}
    }
    Ok(effect)
}

/// `cbz` of a whole register.
fn branches_if_zero(word: u32, register: Register) -> bool {
    word & 0xff00_001f == 0xb400_0000 | u32::from(register.0)
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
        _ if word & 0x7f00_0000 == 0x3600_0000 => "tbz …",
        _ if word & 0x7f00_0000 == 0x3700_0000 => "tbnz …",
        _ if word & 0xff00_0010 == 0x5400_0000 => "b.cond …",
        _ if word & 0x9f00_0000 == 0x1000_0000 => "adr …",
        _ if word & 0x9f00_0000 == 0x9000_0000 => "adrp …",
        _ if word & 0xfc00_0000 == 0x1400_0000 => "b …",
        _ if word & 0xfc00_0000 == 0x9400_0000 => "bl …",
        _ => return format!(".inst {word:#010x}"),
    };
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOC: Shape = Shape { op: Op::Alloc, size: Some(1), count: Some(0), pointer: None, is_aligned: false };
    const FREE: Shape = Shape { op: Op::Free, size: None, count: None, pointer: Some(0), is_aligned: false };
    const MALLOC: Shape = Shape { op: Op::Alloc, size: Some(0), count: None, pointer: None, is_aligned: false };
    const ENTRY: u64 = 0x4000;

    fn place_words(words: &[u32], shape: Shape) -> Placement {
        let code: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        place(&code, ENTRY, shape, |_| false)
    }

    /// Code of Debian's glibc 2.36 and of GCC 12 with `-mbranch-protection=standard`, as the disassembler shows it.
    #[test]
    fn the_site_is_the_first_simulated_instruction_before_which_nothing_is_lost() {
        for (words, shape, offset, reason, text) in [
            // paciasp; stp x29, x30, [sp, #-32]!; adrp x0
            (&[0xd503_233f_u32, 0xa9be_7bfd, 0x9000_0000][..], ALLOC, 0, Reason::ReturnAddressUsed, "paciasp"),
            (&[0xa9be_7bfd], ALLOC, 0, Reason::ReturnAddressUsed, "stp x29, x30, [sp, …]!"),
            // sub sp, sp, #32; str x19, [sp, #16]; cbz x0
            (&[0xd100_83ff, 0xf900_0bf3, 0xb400_0080], ALLOC, 0, Reason::StackMoved, "sub sp, sp, …"),
            (&[0xd100_83ff, 0xf900_0bf3, 0xb400_0080], FREE, 8, Reason::Emulated, "cbz …"),
            (&[0xb400_0080, 0xa9be_7bfd], ALLOC, 0, Reason::Emulated, "cbz …"),
            // bti c; cbz x0
            (&[0xd503_245f, 0xb400_0080], ALLOC, 4, Reason::Emulated, "cbz …"),
            // mmap: tst x5, #0xfff; b.ne
            (&[0xf240_2cbf, 0x5400_0121], ALLOC, 4, Reason::Emulated, "b.cond …"),
            // posix_memalign of free's shape: stp x29, x30, [sp, #-48]!; adrp x3
            (&[0xa9bd_7bfd, 0xd000_08a3], FREE, 4, Reason::Emulated, "adrp …"),
            // glibc's free: cbz x0; stp x29, x30, [sp, #-64]!; mov x29, sp; stp x21, x22, [sp, #32]; adrp x21
            (&[0xb400_0880, 0xa9bc_7bfd, 0x9100_03fd, 0xa902_5bf5, 0xf000_08b5], FREE, 0, Reason::Emulated, "cbz …"),
            // cbz x0; stp x29, x30, [sp, #-64]!; stp x21, x22, [sp, #32]; adrp x21
            (&[0xb400_0880, 0xa9bc_7bfd, 0xa902_5bf5, 0xf000_08b5], FREE, 12, Reason::EmulatedAfterNullCheck, "adrp …"),
            // cbz x1 tells nothing of the pointer.
            (&[0xb400_0881, 0xf000_08b5], FREE, 0, Reason::Emulated, "cbz …"),
            // mov x29, sp; mov x30, x5 (as wrappers do); ldr x0, [x1]; mov x5, x30; svc #0; ldur x3, [x4, #-8]
            (&[0x9100_03fd, 0xf000_08b5], FREE, 0, Reason::FramePointerMoved, ".inst 0x910003fd"),
            (&[0xaa05_03fe, 0xf000_08b5], FREE, 0, Reason::ReturnAddressUsed, ".inst 0xaa0503fe"),
            (&[0xf940_0020, 0xf000_08b5], FREE, 0, Reason::ArgumentLost, ".inst 0xf9400020"),
            (&[0xaa1e_03e5, 0xf000_08b5], ALLOC, 0, Reason::ReturnAddressUsed, ".inst 0xaa1e03e5"),
            (&[0xd400_0001, 0xf000_08b5], FREE, 0, Reason::ControlFlow, ".inst 0xd4000001"),
            (&[0xf85f_8083, 0xf000_08b5], FREE, 0, Reason::Undecodable, ".inst 0xf85f8083"),
            // mov sp, x3; add sp, sp, #32
            (&[0x9100_007f, 0xf000_08b5], FREE, 0, Reason::StackMoved, ".inst 0x9100007f"),
            (&[0x9100_83ff, 0xf000_08b5], FREE, 0, Reason::StackMoved, ".inst 0x910083ff"),
            (&[], ALLOC, 0, Reason::NothingFound, "(bad)"),
        ] {
            let placement = place_words(words, shape);
            let found = (placement.offset, placement.reason, placement.instruction.as_str());
            assert_eq!(found, (offset, reason, text), "{words:08x?}");
            assert_eq!((placement.has_return, placement.jump), (shape.op == Op::Alloc, None));
        }
    }

    #[test]
    fn the_distance_to_the_entrys_stack_pointer_is_followed() {
        // stp x29, x30, [sp, #-48]!; str x19, [sp, #-16]!; sub sp, sp, #0x1, lsl #12 would be too far for a cookie.
        let words = |words: &[u32]| (place_words(words, FREE).offset, place_words(words, FREE).sp_words);
        assert_eq!(words(&[0xa9bd_7bfd, 0xf81f_0ff3, 0x9000_0003]), (8, 8));
        assert_eq!(words(&[0xd100_83ff, 0x9000_0003]), (4, 4));
        assert_eq!(words(&[0xd140_07ff, 0x9000_0003]), (0, 0));
    }

    #[test]
    fn a_branch_into_the_path_keeps_the_probe_at_the_entry() {
        let code: Vec<u8> = [0xf240_2cbf_u32, 0x5400_0121].iter().flat_map(|word| word.to_le_bytes()).collect();
        let placement = place(&code, ENTRY, MALLOC, |vaddr| vaddr == ENTRY + 4);
        assert_eq!((placement.offset, placement.reason), (0, Reason::BranchInto));
        assert_eq!(place(&code, ENTRY, MALLOC, |vaddr| vaddr == ENTRY).offset, 4);
    }

    #[test]
    fn a_function_that_only_jumps_is_recognised_after_a_landing_pad_too() {
        let jump = |words: &[u32]| place_words(words, ALLOC).jump;
        assert!(jump(&[0x1400_0004]).is_some_and(|jump| jump.target == 0x4010 && jump.passes_on(ALLOC)));
        assert!(jump(&[0xd503_245f, 0x1400_0004]).is_some_and(|jump| jump.target == 0x4014));
        assert!(!jump(&[0x1400_0004]).is_some_and(|jump| jump.passes_on(Shape { size: Some(2), ..ALLOC })));
        // Not a jump of the caller's stack any more.
        assert!(place_words(&[0xd100_83ff, 0x1400_0004], FREE).jump.is_none());
    }
}
