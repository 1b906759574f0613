//! arm64.

use object::elf;

use super::Facts;

pub(super) const FACTS: Facts = Facts {
    name: "arm64",
    elf: elf::EM_AARCH64.0,
    // "DWARF for the Arm 64-bit Architecture", 4.1.
    register_names: &[
        "x0", "x1", "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16", "x17", "x18", "x19",
        "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x29", "x30", "sp",
    ],
    // AAPCS64, 6.8.2.
    arguments: &[0, 1, 2, 3, 4, 5, 6, 7],
    frame_pointer: 29,
    stack_pointer: 31,
    return_address: 30,
    user_end: 1 << 48,
    slot_relocations: [elf::R_AARCH64_JUMP_SLOT.0, elf::R_AARCH64_GLOB_DAT.0],
};

/// x30 is 5, x29 is 6, sp is 7; x0 to x4 and x8 to x15 keep their numbers. The others do not occur in unwind rows in practice.
pub(super) fn rule_code(number: u16) -> Option<u8> {
    match number {
        30 => Some(5),
        29 => Some(6),
        31 => Some(7),
        0..=4 | 8..=15 => u8::try_from(number).ok(),
        _ => None,
    }
}
