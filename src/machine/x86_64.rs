//! x86-64.

use object::elf;

use super::Facts;

pub(super) const FACTS: Facts = Facts {
    name: "x86-64",
    elf: elf::EM_X86_64.0,
    // System V ABI, table 3.36.
    register_names: &["rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"],
    // System V ABI, 3.2.3: rdi rsi rdx rcx r8 r9.
    arguments: &[5, 4, 1, 2, 8, 9],
    frame_pointer: 6,
    stack_pointer: 7,
    return_address: 16,
    // 47 bits, of which the last page is never mapped; `[vsyscall]` lies above.
    user_end: (1 << 47) - 4096,
    slot_relocations: [elf::R_X86_64_JUMP_SLOT.0, elf::R_X86_64_GLOB_DAT.0],
};

/// The DWARF number itself.
pub(super) fn rule_code(number: u16) -> Option<u8> {
    u8::try_from(number).ok().filter(|&number| number < 16)
}
