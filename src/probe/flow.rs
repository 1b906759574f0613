//! Control flow of one instruction, as needed to follow a function's paths, on either machine.
//!
//! x86-64 is decoded by iced. arm64's branches are few and of fixed length, so they are decoded here ("Arm Architecture Reference Manual",
//! C4.1, "Branches, Exception Generating and System instructions").

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Instruction, OpKind};

use crate::machine::Machine;

/// Where control goes after an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// To the next instruction.
    Next(u64),
    /// To the next instruction or to the target.
    Branch {
        /// The next instruction.
        next: u64,
        /// The branch target.
        target: u64,
    },
    /// Only to the target.
    Jump(u64),
    /// To a function, which returns to the next instruction.
    Call {
        /// The next instruction.
        next: u64,
        /// The function.
        target: u64,
    },
    /// Not known statically: returns, jumps through registers or memory, traps; and bytes that are not an instruction.
    Unknown,
}

/// The flow of the instruction at `vaddr`, with which `code` begins.
#[must_use]
pub fn flow_at(machine: Machine, code: &[u8], vaddr: u64) -> Flow {
    match machine {
        Machine::X86_64 => x86_flow(&decode_x86(code, vaddr)),
        Machine::Aarch64 => word_of(code).map_or(Flow::Unknown, |word| arm64_flow(word, vaddr)),
    }
}

/// Calls `each` with the target of every jump, conditional or not, in code that begins at `vaddr` and is read from its start to its end.
pub fn for_each_jump(machine: Machine, code: &[u8], vaddr: u64, mut each: impl FnMut(u64)) {
    let mut note = |flow| {
        if let Flow::Branch { target, .. } | Flow::Jump(target) = flow {
            each(target);
        }
    };
    match machine {
        Machine::X86_64 => {
            Decoder::with_ip(64, code, vaddr, DecoderOptions::NONE).iter().for_each(|instruction| note(x86_flow(&instruction)))
        }
        Machine::Aarch64 => {
            for (index, word) in code.chunks_exact(4).filter_map(word_of).enumerate() {
                note(arm64_flow(word, vaddr.wrapping_add(4 * index as u64)));
            }
        }
    }
}

/// The slot of the global offset table through which the linkage stub at `vaddr` jumps; `None` if `code` is not such a stub.
#[must_use]
pub fn stub_slot(machine: Machine, code: &[u8], vaddr: u64) -> Option<u64> {
    match machine {
        Machine::X86_64 => x86_stub_slot(code, vaddr),
        Machine::Aarch64 => arm64_stub_slot(code, vaddr),
    }
}

fn decode_x86(code: &[u8], vaddr: u64) -> Instruction {
    Decoder::with_ip(64, code, vaddr, DecoderOptions::NONE).decode()
}

fn x86_flow(instruction: &Instruction) -> Flow {
    let target = (instruction.op0_kind() == OpKind::NearBranch64).then(|| instruction.near_branch_target());
    let next = instruction.next_ip();
    match (instruction.flow_control(), target) {
        _ if instruction.is_invalid() => Flow::Unknown,
        (FlowControl::Next, _) => Flow::Next(next),
        (FlowControl::ConditionalBranch, Some(target)) => Flow::Branch { next, target },
        (FlowControl::UnconditionalBranch, Some(target)) => Flow::Jump(target),
        (FlowControl::Call, Some(target)) => Flow::Call { next, target },
        _ => Flow::Unknown,
    }
}

/// `jmp *slot(%rip)`; `endbr64` may precede it.
fn x86_stub_slot(code: &[u8], vaddr: u64) -> Option<u64> {
    let mut instructions = Decoder::with_ip(64, code, vaddr, DecoderOptions::NONE).into_iter();
    let first = instructions.next()?;
    let jump = if first.code() == Code::Endbr64 { instructions.next()? } else { first };
    (jump.code() == Code::Jmp_rm64 && jump.is_ip_rel_memory_operand()).then(|| jump.ip_rel_memory_address())
}

/// An arm64 instruction: 4 bytes, little-endian.
pub(super) fn word_of(code: &[u8]) -> Option<u32> {
    code.first_chunk().copied().map(u32::from_le_bytes)
}

/// The signed field of `bits` bits at bit `at`, times 4: a branch displacement.
fn distance(word: u32, at: u32, bits: u32) -> i64 {
    let field = word << (32 - at - bits);
    i64::from(field.cast_signed() >> (32 - bits)) * 4
}

fn arm64_flow(word: u32, vaddr: u64) -> Flow {
    let next = vaddr.wrapping_add(4);
    let to = |at, bits| vaddr.wrapping_add_signed(distance(word, at, bits));
    match word {
        // udf: zeros, as between functions.
        word if word >> 16 == 0 => Flow::Unknown,
        // b, bl
        word if word & 0xfc00_0000 == 0x1400_0000 => Flow::Jump(to(0, 26)),
        word if word & 0xfc00_0000 == 0x9400_0000 => Flow::Call { next, target: to(0, 26) },
        // b.cond; cbz, cbnz; tbz, tbnz
        word if word & 0xff00_0000 == 0x5400_0000 => Flow::Branch { next, target: to(5, 19) },
        word if word & 0x7e00_0000 == 0x3400_0000 => Flow::Branch { next, target: to(5, 19) },
        word if word & 0x7e00_0000 == 0x3600_0000 => Flow::Branch { next, target: to(5, 14) },
        // Branches to registers, with or without pointer authentication; exceptions.
        word if word & 0xfe00_0000 == 0xd600_0000 || word & 0xff00_0000 == 0xd400_0000 => Flow::Unknown,
        _ => Flow::Next(next),
    }
}

/// `bti`, `nop` and other hints that have no effect on what is analysed here. (`paciasp` is a hint too, but changes x30, so it is not
/// included.)
pub(super) fn is_idle_hint(word: u32) -> bool {
    matches!(word, 0xd503_201f | 0xd503_241f | 0xd503_245f | 0xd503_249f | 0xd503_24df)
}

/// `adrp x16, page; ldr x17, [x16, #offset]`; `bti c` may precede them (System V ABI for the Arm 64-bit Architecture, linkers' PLT).
fn arm64_stub_slot(code: &[u8], vaddr: u64) -> Option<u64> {
    let skipped = usize::from(word_of(code).is_some_and(is_idle_hint)) * 4;
    let (page, load) = (word_of(code.get(skipped..)?)?, word_of(code.get(skipped + 4..)?)?);
    if page & 0x9f00_001f != 0x9000_0010 || load & 0xffc0_03ff != 0xf940_0211 {
        return None;
    }
    let pages = i64::from(((page >> 5 & 0x7_ffff) << 2 | page >> 29 & 3) << 11).wrapping_shl(32) >> 43;
    let base = (vaddr.wrapping_add(skipped as u64) & !0xfff).wrapping_add_signed(pages.wrapping_mul(4096));
    Some(base.wrapping_add(u64::from(load >> 10 & 0xfff) * 8))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn arm64(word: u32) -> Flow {
        flow_at(Machine::Aarch64, &word.to_le_bytes(), 0x1000)
    }

    /// The words are the output of the assembler (GNU as 2.40).
    #[test]
    fn every_branch_of_arm64_has_the_target_given_to_the_assembler() {
        assert_eq!(arm64(0x1400_0002), Flow::Jump(0x1008)); // b .+8
        assert_eq!(arm64(0x17ff_ffff), Flow::Jump(0xffc)); // b .-4
        assert_eq!(arm64(0x97ff_fff0), Flow::Call { next: 0x1004, target: 0xfc0 }); // bl .-64
        assert_eq!(arm64(0x5400_0041), Flow::Branch { next: 0x1004, target: 0x1008 }); // b.ne .+8
        assert_eq!(arm64(0xb400_0080), Flow::Branch { next: 0x1004, target: 0x1010 }); // cbz x0, .+16
        assert_eq!(arm64(0x35ff_ffe1), Flow::Branch { next: 0x1004, target: 0xffc }); // cbnz w1, .-4
        assert_eq!(arm64(0x3607_ffe2), Flow::Branch { next: 0x1004, target: 0xffc }); // tbz w2, #0, .-4
        assert_eq!(arm64(0xd65f_03c0), Flow::Unknown); // ret
        assert_eq!(arm64(0xd61f_0220), Flow::Unknown); // br x17
        assert_eq!(arm64(0xd420_0000), Flow::Unknown); // brk #0
        assert_eq!(arm64(0), Flow::Unknown);
        assert_eq!(arm64(0xa9be_7bfd), Flow::Next(0x1004)); // stp x29, x30, [sp, #-32]!
        assert_eq!(flow_at(Machine::Aarch64, &[0x1f, 0x20], 0), Flow::Unknown, "truncated");
    }

    #[test]
    fn a_linkage_stub_of_arm64_names_its_slot() {
        let code = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        // As written by ld at 0x630: adrp x16, 0x20000 (32 pages up); ldr x17, [x16, #4024]; add; br x17.
        let stub = [0x9000_0110, 0xf947_de11, 0x913e_e210, 0xd61f_0220];
        assert_eq!(stub_slot(Machine::Aarch64, &code(&stub), 0x630), Some(0x2_0000 + 4024));
        let with_bti = [&[0xd503_245f], &stub[..]].concat();
        assert_eq!(stub_slot(Machine::Aarch64, &code(&with_bti), 0x630), Some(0x2_0000 + 4024));
        // adrp x16, one page down.
        assert_eq!(stub_slot(Machine::Aarch64, &code(&[0xf0ff_fff0, 0xf947_de11]), 0x5630), Some(0x4000 + 4024));
        assert_eq!(stub_slot(Machine::Aarch64, &code(&stub[1..]), 0x630), None);
    }
}
