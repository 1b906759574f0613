//! Registers by number and name, and which of them carry arguments.

use super::Machine;

/// A general register by its DWARF number, which is that of [`Machine::HOST`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(pub u8);

impl Register {
    /// The name as assemblers write it; `?` for a number that is not a general-purpose register.
    #[must_use]
    pub fn name(self) -> &'static str {
        Machine::HOST.register_name(self.0)
    }
}

/// The register that holds argument `index` at a function's entry; `None` for those on the stack.
#[must_use]
pub fn argument_register(index: u8) -> Option<Register> {
    Machine::HOST.argument_register(index).map(Register)
}
