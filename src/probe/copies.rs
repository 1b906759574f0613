//! Whether a file's code has copies of a function, made by profile-guided optimization: calls through a pointer are then preceded by a
//! comparison of the pointer with the function, and if they are equal, code copied from it runs in place of a call. A probe at the function
//! does not see those calls.
//!
//! A function's address as an operand of a comparison is the sign (GCC: indirect call promotion, gcc/value-prof.cc, `gimple_ic`; LLVM does
//! the same). Without copies, addresses of functions are stored and passed, and not compared, but for one: the interpreter itself asks
//! whether its pointer leads to `_PyObject_Malloc` (`_PyMem_PymallocEnabled`, Objects/obmalloc.c), two or three times in 3.8 to 3.13. Debian's
//! 3.11, which has copies, compares with `_PyObject_Free` 52 times.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind, Register};

use crate::allocator::functions::Function;
use crate::machine::Machine;
use crate::process::elf::{Elf, ReadAt};

/// Bytes of code that are decoded at once.
const CHUNK_BYTES: u64 = 1 << 20;
/// Bytes of code that are decoded in all: an interpreter has up to 10 MB.
const CODE_BYTES_MAX: u64 = 128 << 20;
/// Instructions from the one that takes a function's address to the comparison.
const APART_MAX: u32 = 16;

/// Whether a comparison with this function shows a copy.
#[must_use]
pub fn tells(function: &Function) -> bool {
    function.symbol != "_PyObject_Malloc"
}

/// Whether the file's code compares pointers with one of these functions. On arm64 this is not told: `true`, as it could be.
#[must_use]
pub fn are_there<R: ReadAt>(elf: &Elf<R>, functions: &[u64]) -> bool {
    if Machine::HOST != Machine::X86_64 {
        return true;
    }
    let mut left = CODE_BYTES_MAX;
    for segment in elf.segments().iter().filter(|segment| segment.executable) {
        let mut search = Search { functions, taken: None };
        let (mut at, end) = (segment.vaddr, segment.vaddr.saturating_add(segment.file_bytes));
        while at < end && left > 0 {
            let code = elf.bytes_at(at, CHUNK_BYTES.min(left));
            if code.is_empty() {
                break;
            }
            if search.finds(&code, at) {
                return true;
            }
            (at, left) = (at.saturating_add(code.len() as u64), left.saturating_sub(code.len() as u64));
        }
    }
    false
}

/// A search through code, from the first instruction to the last.
struct Search<'a> {
    functions: &'a [u64],
    /// A register that holds the address of one of the functions, and the number of instructions since it was taken.
    taken: Option<(Register, u32)>,
}

impl Search<'_> {
    fn finds(&mut self, code: &[u8], vaddr: u64) -> bool {
        Decoder::with_ip(64, code, vaddr, DecoderOptions::NONE).iter().any(|instruction| self.is_comparison(&instruction))
    }

    fn is_comparison(&mut self, instruction: &Instruction) -> bool {
        let is_one = |addr: u64| self.functions.contains(&addr);
        match instruction.mnemonic() {
            Mnemonic::Cmp => {
                let operands = || (0..instruction.op_count()).map(|index| (index, instruction.op_kind(index)));
                let is_taken = |register: Register| self.taken.is_some_and(|(taken, _)| taken == register);
                return operands().any(|(index, kind)| match kind {
                    OpKind::Register => is_taken(instruction.op_register(index)),
                    OpKind::Immediate32to64 => is_one(instruction.immediate32to64().cast_unsigned()),
                    _ => false,
                });
            }
            Mnemonic::Lea if instruction.is_ip_rel_memory_operand() && is_one(instruction.ip_rel_memory_address()) => {
                self.taken = Some((instruction.op0_register(), 0));
            }
            // Other code, or the register has another value by now.
            Mnemonic::Ret | Mnemonic::Jmp | Mnemonic::Call => self.taken = None,
            _ => {
                let has_other = |(register, since): &mut (Register, u32)| {
                    *since += 1;
                    *since <= APART_MAX && instruction.op0_register() != *register
                };
                self.taken = self.taken.take_if(has_other);
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0x40_1000;
    const FUNCTION: u64 = 0x40_2000;

    fn finds(code: &[u8]) -> bool {
        Search { functions: &[FUNCTION], taken: None }.finds(code, AT)
    }

    #[test]
    fn a_comparison_with_the_function_shows_a_copy() {
        // cmp rax, 0x402000
        assert!(finds(&[0x48, 0x3d, 0x00, 0x20, 0x40, 0x00]));
        // cmp qword [rip+0x1000], 0x402000
        assert!(finds(&[0x48, 0x81, 0x3d, 0x00, 0x10, 0x00, 0x00, 0x00, 0x20, 0x40, 0x00]));
        // lea rdx, [rip+0xff9] (0x402000); cmp rax, rdx
        assert!(finds(&[0x48, 0x8d, 0x15, 0xf9, 0x0f, 0x00, 0x00, 0x48, 0x39, 0xd0]));
    }

    #[test]
    fn an_address_that_is_stored_or_called_does_not() {
        // mov rax, 0x402000; mov [rdi], rax
        assert!(!finds(&[0x48, 0xc7, 0xc0, 0x00, 0x20, 0x40, 0x00, 0x48, 0x89, 0x07]));
        // lea rdx, [rip+0xff9]; mov [rdi], rdx; mov rdx, rsi; cmp rax, rdx
        assert!(!finds(&[0x48, 0x8d, 0x15, 0xf9, 0x0f, 0x00, 0x00, 0x48, 0x89, 0x17, 0x48, 0x89, 0xf2, 0x48, 0x39, 0xd0]));
        // cmp rax, 0x402001
        assert!(!finds(&[0x48, 0x3d, 0x01, 0x20, 0x40, 0x00]));
    }
}
