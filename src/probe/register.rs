//! Registers of x86-64 by number and name, and which of them carry arguments.

/// A register of x86-64 by its DWARF number (System V ABI, table 3.36): 0 rax, 1 rdx, 2 rcx, 3 rbx, 4 rsi, 5 rdi, 6 rbp, 7 rsp, 8–15.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Register(pub u8);

impl Register {
    /// The name as assemblers write it; `?` for a number that is no general register.
    #[must_use]
    pub fn name(self) -> &'static str {
        const NAMES: [&str; 16] =
            ["rax", "rdx", "rcx", "rbx", "rsi", "rdi", "rbp", "rsp", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"];
        NAMES.get(usize::from(self.0)).copied().unwrap_or("?")
    }
}

/// The register that holds argument `index` at a function's entry (System V ABI for x86-64, 3.2.3); `None` from the seventh on.
#[must_use]
pub fn argument_register(index: u8) -> Option<Register> {
    // rdi rsi rdx rcx r8 r9
    [5, 4, 1, 2, 8, 9].get(usize::from(index)).copied().map(Register)
}
