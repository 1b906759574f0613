//! The 64-bit cookie that a probe site passes to its program: the kind of call, and the locations of its arguments.
//!
//! Layout: `enum fp_cookie_shift` of bpf/fragprof.h. The target's slot is not known when a site is planned; it is set when attaching.

use crate::allocator::functions::{Function, FunctionId, Op};
use crate::bpf;
use crate::machine::register::Register;

/// The call has no such argument; also the bit mask of a register field.
const NO_REGISTER: u64 = bpf::NO_REG as u64;

/// The information that a site passes to its program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Cookie {
    /// The effect of the call.
    pub op: Op,
    /// The entry point.
    pub function: FunctionId,
    /// The register with the size at the site.
    pub size: Option<Register>,
    /// The register with the count by which the size is multiplied, or with the alignment.
    pub count: Option<Register>,
    /// The register with the block's address, or with the address of the result.
    pub pointer: Option<Register>,
    /// Words between the return address and the stack pointer at the site.
    pub sp_words: u8,
    /// Whether the kernel single-steps the instruction at the site.
    pub stepped: bool,
}

impl Cookie {
    /// The cookie for a target's slot.
    #[must_use]
    pub fn encode(&self, slot: u16) -> u64 {
        let register = |r: Option<Register>| r.map_or(NO_REGISTER, |r| u64::from(r.0) & NO_REGISTER);
        self.op as u64
            | u64::from(self.function.0) << bpf::COOKIE_FUNCTION_SHIFT
            | register(self.size) << bpf::COOKIE_SIZE_REG_SHIFT
            | register(self.count) << bpf::COOKIE_COUNT_REG_SHIFT
            | register(self.pointer) << bpf::COOKIE_PTR_REG_SHIFT
            | of_slot(slot)
            | u64::from(self.sp_words) << bpf::COOKIE_SP_WORDS_SHIFT
            | u64::from(self.stepped) << bpf::COOKIE_STEPPED_SHIFT
            | u64::from(self.function.get().is_some_and(Function::may_throw)) << bpf::COOKIE_MAY_THROW_SHIFT
            | u64::from(self.function.get().is_some_and(Function::frees_on_failure)) << bpf::COOKIE_FREES_ON_FAILURE_SHIFT
            | u64::from(self.function.get().is_some_and(|function| function.shape.is_aligned)) << bpf::COOKIE_COUNT_ALIGNS_SHIFT
    }

    /// Splits a word into cookie and slot; `None` if its op is unknown.
    #[must_use]
    pub fn decode(word: u64) -> Option<(Self, u16)> {
        let byte = |shift: u32| (word >> shift & 0xff) as u8;
        let register = |shift: u32| {
            let number = word >> shift & NO_REGISTER;
            (number != NO_REGISTER).then_some(Register(number as u8))
        };
        let cookie = Self {
            op: Op::from_number(byte(bpf::COOKIE_OP_SHIFT))?,
            function: FunctionId(byte(bpf::COOKIE_FUNCTION_SHIFT)),
            size: register(bpf::COOKIE_SIZE_REG_SHIFT),
            count: register(bpf::COOKIE_COUNT_REG_SHIFT),
            pointer: register(bpf::COOKIE_PTR_REG_SHIFT),
            sp_words: byte(bpf::COOKIE_SP_WORDS_SHIFT),
            stepped: word >> bpf::COOKIE_STEPPED_SHIFT & 1 == 1,
        };
        Some((cookie, slot_of(word)))
    }
}

/// The bits of a cookie for the target's slot.
#[must_use]
pub const fn of_slot(slot: u16) -> u64 {
    (slot as u64) << bpf::COOKIE_SLOT_SHIFT
}

/// The target's slot in a cookie.
#[must_use]
pub const fn slot_of(word: u64) -> u16 {
    (word >> bpf::COOKIE_SLOT_SHIFT) as u16
}

/// What happens to the block at a size-selective site, as in [`bpf::Op`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum LargeOp {
    /// A new block.
    Alloc = bpf::Op::LargeAlloc as u8,
    /// A block that is freed.
    Free = bpf::Op::LargeFree as u8,
}

/// The cookie of the program's entry point, where its thread is stopped.
pub const OP_ENTRY: u64 = bpf::Op::Entry as u64;

/// The probe is in a vfork child, for a target in whose memory the child runs.
pub const VFORK: u64 = 1 << bpf::COOKIE_VFORK_SHIFT;

/// The cookie of a size-selective site for a target's slot. `function`: the function for which its records count;
/// `register` holds the block's address or, if `holds_chunk`, its chunk's.
#[must_use]
pub fn encode_large(op: LargeOp, function: FunctionId, register: Register, holds_chunk: bool, slot: u16) -> u64 {
    op as u64
        | u64::from(function.0) << bpf::COOKIE_FUNCTION_SHIFT
        | NO_REGISTER << bpf::COOKIE_SIZE_REG_SHIFT
        | NO_REGISTER << bpf::COOKIE_COUNT_REG_SHIFT
        | (u64::from(register.0) & NO_REGISTER) << bpf::COOKIE_PTR_REG_SHIFT
        | of_slot(slot)
        | u64::from(holds_chunk) << bpf::COOKIE_HOLDS_CHUNK_SHIFT
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fmt::Write as _;
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    fn any_cookie() -> impl Strategy<Value = (Cookie, u16)> {
        let register = || proptest::option::of((0u8..16).prop_map(Register));
        (1u8..=5, any::<u8>(), [register(), register(), register()], any::<u8>(), any::<bool>(), any::<u16>()).prop_map(
            |(op, function, [size, count, pointer], sp_words, stepped, slot)| {
                let op = Op::from_number(op).unwrap();
                (Cookie { op, function: FunctionId(function), size, count, pointer, sp_words, stepped }, slot)
            },
        )
    }

    proptest! {
        #[test]
        fn a_cookie_survives_encoding((cookie, slot) in any_cookie()) {
            prop_assert_eq!(Cookie::decode(cookie.encode(slot)), Some((cookie, slot)));
        }
    }

    #[test]
    fn the_macros_of_the_wire_format_decode_it_in_the_same_way() {
        let cookie = |op, function, size: Option<u8>, count: Option<u8>, pointer: Option<u8>, sp_words| Cookie {
            op,
            function: FunctionId(function),
            size: size.map(Register),
            count: count.map(Register),
            pointer: pointer.map(Register),
            sp_words,
            stepped: sp_words == 3,
        };
        let cases = [
            (cookie(Op::Alloc, 0, Some(5), None, None, 0), 0u16),
            (cookie(Op::Alloc, 255, Some(4), Some(5), None, 0), 0xffff),
            (cookie(Op::Free, 17, None, None, Some(15), 255), 1023),
            (cookie(Op::Realloc, 3, Some(1), Some(4), Some(5), 3), 7),
            (cookie(Op::PosixMemalign, 4, Some(1), None, Some(5), 0), 512),
            (cookie(Op::Xallocx, 5, Some(4), None, Some(0), 1), 1),
            (cookie(Op::AllocString, 6, None, None, None, 0), 2),
        ];
        let directory = tempfile::tempdir().unwrap();
        let mut source = String::from("#include <stdio.h>\n#include \"fragprof.h\"\nint main(void) { unsigned long long c;\n");
        let mut expected = String::new();
        for (cookie, slot) in cases {
            let register = |r: Option<Register>| r.map_or(0x1f, |r| r.0);
            writeln!(
                source,
                "c = {}ULL; printf(\"%u %u %u %u %u %u %u %u\\n\", FP_COOKIE_OP(c), FP_COOKIE_FUNCTION(c), FP_COOKIE_SIZE_REG(c), \
                 FP_COOKIE_COUNT_REG(c), FP_COOKIE_PTR_REG(c), FP_COOKIE_SLOT(c), FP_COOKIE_SP_WORDS(c), FP_COOKIE_STEPPED(c));",
                cookie.encode(slot)
            )
            .unwrap();
            let op = match cookie.op {
                Op::Alloc => 1,
                Op::Free => 2,
                Op::Realloc => 3,
                Op::PosixMemalign => 4,
                Op::Xallocx => 5,
                Op::AllocString => 9,
            };
            writeln!(
                expected,
                "{op} {} {} {} {} {slot} {} {}",
                cookie.function.0,
                register(cookie.size),
                register(cookie.count),
                register(cookie.pointer),
                cookie.sp_words,
                u8::from(cookie.stepped)
            )
            .unwrap();
        }
        for (op, holds_chunk, slot) in [(LargeOp::Alloc, false, 0u16), (LargeOp::Free, true, 1023)] {
            let word = encode_large(op, FunctionId(9), Register(3), holds_chunk, slot);
            writeln!(
                source,
                "c = {word}ULL; printf(\"%u %u %u %u %u %u\\n\", FP_COOKIE_OP(c), FP_COOKIE_FUNCTION(c), FP_COOKIE_PTR_REG(c), \
                 FP_COOKIE_SLOT(c), FP_COOKIE_SP_WORDS(c), FP_COOKIE_HOLDS_CHUNK(c));"
            )
            .unwrap();
            writeln!(expected, "{} 9 3 {slot} 0 {}", op as u8, u8::from(holds_chunk)).unwrap();
        }
        writeln!(source, "_Static_assert(FP_COOKIE_VFORK({VFORK}ULL) == 1 && !FP_COOKIE_VFORK({}ULL), \"\");", !VFORK).unwrap();
        source.push_str(
            "_Static_assert(FP_OP_LARGE_ALLOC == 6 && FP_OP_LARGE_FREE == 7 && FP_OP_ENTRY == 8 && FP_OP_ALLOC_STRING == 9, \"\");\n",
        );
        source.push_str("_Static_assert(FP_OP_ALLOC == 1 && FP_OP_FREE == 2 && FP_OP_REALLOC == 3 && FP_OP_POSIX_MEMALIGN == 4 && FP_OP_XALLOCX == 5 && FP_NO_REG == 0x1f, \"\");\nreturn 0; }\n");
        let (c, program) = (directory.path().join("cookie.c"), directory.path().join("cookie"));
        std::fs::write(&c, source).unwrap();
        let include = concat!(env!("CARGO_MANIFEST_DIR"), "/bpf");
        let compiled = Command::new("cc").arg("-I").arg(include).arg("-o").arg(&program).arg(&c).status().unwrap();
        assert!(compiled.success());
        let output = Command::new(&program).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), expected);
    }
}
