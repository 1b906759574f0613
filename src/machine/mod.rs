//! Properties of the instruction set: registers by number and name, user addresses, the registers in unwind rules, relocations. One file per
//! architecture; the BPF side is `bpf/machine_*.bpf.h`.
//!
//! Files are read for the machine named in their header, so that an unwind table of one machine can be built and tested on another. Only
//! processes of [`Machine::HOST`] can be watched: others are refused.

mod aarch64;
pub mod open_files;
pub mod register;
pub mod stopped;
pub mod user_space;
mod x86_64;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Machine {
    /// x86-64.
    X86_64,
    /// arm64, little-endian.
    Aarch64,
}

/// The properties of an instruction set.
struct Facts {
    name: &'static str,
    /// `e_machine` of ELF files.
    elf: u16,
    /// Names of the general registers, by DWARF number.
    register_names: &'static [&'static str],
    /// DWARF numbers of the registers that carry arguments, in order.
    arguments: &'static [u8],
    /// DWARF numbers.
    frame_pointer: u16,
    stack_pointer: u16,
    return_address: u16,
    /// First address that user code cannot have.
    user_end: u64,
    /// Types of relocations that bind a slot of the global offset table to a name.
    slot_relocations: [u32; 2],
}

impl Machine {
    /// The one that fragprof was compiled for.
    pub const HOST: Self = if cfg!(target_arch = "aarch64") { Self::Aarch64 } else { Self::X86_64 };

    /// The machine of ELF files with this `e_machine`.
    #[must_use]
    pub fn from_elf(e_machine: u16) -> Option<Self> {
        [Self::X86_64, Self::Aarch64].into_iter().find(|machine| machine.facts().elf == e_machine)
    }

    const fn facts(self) -> &'static Facts {
        match self {
            Self::X86_64 => &x86_64::FACTS,
            Self::Aarch64 => &aarch64::FACTS,
        }
    }

    /// Its display name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.facts().name
    }

    /// A general register's assembler name, by its DWARF number; `?` for an invalid number.
    #[must_use]
    pub fn register_name(self, number: u8) -> &'static str {
        self.facts().register_names.get(usize::from(number)).copied().unwrap_or("?")
    }

    /// DWARF number of the register that holds argument `index` at a function's entry; `None` for those on the stack.
    #[must_use]
    pub fn argument_register(self, index: u8) -> Option<u8> {
        self.facts().arguments.get(usize::from(index)).copied()
    }

    /// DWARF number of the frame pointer.
    #[must_use]
    pub const fn frame_pointer(self) -> u16 {
        self.facts().frame_pointer
    }

    /// DWARF number of the stack pointer.
    #[must_use]
    pub const fn stack_pointer(self) -> u16 {
        self.facts().stack_pointer
    }

    /// DWARF number of the return address's column: that of a register if calls leave it in one.
    #[must_use]
    pub const fn return_address(self) -> u16 {
        self.facts().return_address
    }

    /// First address that user code cannot have; `FP_USER_END` of the programs.
    #[must_use]
    pub const fn user_end(self) -> u64 {
        self.facts().user_end
    }

    /// Types of relocations by which the dynamic loader writes a function's address into a slot.
    #[must_use]
    pub const fn slot_relocations(self) -> [u32; 2] {
        self.facts().slot_relocations
    }

    /// The four bits by which unwind rules name a register; `None` for those that they cannot name. The frame pointer is 6 and the stack
    /// pointer 7 on every machine (`bpf/machine.bpf.h`).
    #[must_use]
    pub fn rule_code(self, number: u16) -> Option<u8> {
        match self {
            Self::X86_64 => x86_64::rule_code(number),
            Self::Aarch64 => aarch64::rule_code(number),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_name_the_frame_and_the_stack_pointer_alike_on_every_machine() {
        for machine in [Machine::X86_64, Machine::Aarch64] {
            assert_eq!(machine.rule_code(machine.frame_pointer()), Some(6));
            assert_eq!(machine.rule_code(machine.stack_pointer()), Some(7));
            let codes: Vec<u8> = (0..64).filter_map(|number| machine.rule_code(number)).collect();
            let distinct: std::collections::BTreeSet<&u8> = codes.iter().collect();
            assert_eq!((distinct.len(), codes.iter().all(|&code| code < 16)), (codes.len(), true), "{codes:?}");
        }
    }

    #[test]
    fn every_machine_is_found_by_its_elf_number() {
        assert_eq!(Machine::from_elf(62), Some(Machine::X86_64));
        assert_eq!(Machine::from_elf(183), Some(Machine::Aarch64));
        assert_eq!(Machine::from_elf(40), None);
    }
}
