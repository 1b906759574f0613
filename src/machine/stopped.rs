//! A process that stands still under ptrace: its registers, and the breakpoint instruction.

use std::io;

/// What the breakpoint instruction replaces: bits of the word at its address.
pub const BREAKPOINT_MASK: u64 = if cfg!(target_arch = "aarch64") { 0xffff_ffff } else { 0xff };
/// The breakpoint instruction: `int3`, or `brk #0`.
pub const BREAKPOINT: u64 = if cfg!(target_arch = "aarch64") { 0xd420_0000 } else { 0xcc };
/// How far behind a breakpoint its process stops.
pub const BREAKPOINT_PASSED_BYTES: u64 = if cfg!(target_arch = "aarch64") { 0 } else { 1 };

/// The general registers.
pub struct Registers(libc::user_regs_struct);

impl Registers {
    /// Those of a stopped child.
    ///
    /// # Errors
    /// If it is no child of this thread, or runs.
    pub fn read(pid: i32) -> io::Result<Self> {
        // SAFETY: the struct is plain integers, so zeroes are a value of it.
        let mut registers = Self(unsafe { std::mem::zeroed() });
        registers.exchange(libc::PTRACE_GETREGSET, pid)?;
        Ok(registers)
    }

    /// Makes them those of a stopped child.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn write(&mut self, pid: i32) -> io::Result<()> {
        self.exchange(libc::PTRACE_SETREGSET, pid)
    }

    fn exchange(&mut self, request: libc::c_uint, pid: i32) -> io::Result<()> {
        let mut part = libc::iovec { iov_base: (&raw mut self.0).cast(), iov_len: size_of::<libc::user_regs_struct>() };
        // SAFETY: the part is the struct's own memory, and both outlive the call.
        let result = unsafe { libc::ptrace(request, pid, libc::NT_PRSTATUS as usize, &raw mut part) };
        if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Registers {
    /// The instruction pointer.
    #[must_use]
    pub fn pc(&self) -> u64 {
        self.0.rip
    }

    /// Sets the instruction pointer.
    pub fn set_pc(&mut self, pc: u64) {
        self.0.rip = pc;
    }

    /// Whether a stop at a system call is its entry, after a stop that was one or was not: an entry has -ENOSYS in rax.
    #[must_use]
    pub fn enters_call(&self, after_entry: bool) -> bool {
        self.0.rax == (-i64::from(libc::ENOSYS)).cast_unsigned() && !after_entry
    }

    /// The system call's number.
    #[must_use]
    pub fn call(&self) -> u64 {
        self.0.orig_rax
    }

    /// Its result.
    #[must_use]
    pub fn result(&self) -> u64 {
        self.0.rax
    }

    /// Its third argument.
    #[must_use]
    pub fn third_argument(&self) -> u64 {
        self.0.rdx
    }
}

#[cfg(target_arch = "aarch64")]
impl Registers {
    /// The instruction pointer.
    #[must_use]
    pub fn pc(&self) -> u64 {
        self.0.pc
    }

    /// Sets the instruction pointer.
    pub fn set_pc(&mut self, pc: u64) {
        self.0.pc = pc;
    }

    /// Whether a stop at a system call is its entry: x7 is 0 there and 1 at its end (arch/arm64/kernel/ptrace.c, report_syscall).
    #[must_use]
    pub fn enters_call(&self, _after_entry: bool) -> bool {
        self.0.regs[7] == 0
    }

    /// The system call's number.
    #[must_use]
    pub fn call(&self) -> u64 {
        self.0.regs[8]
    }

    /// Its result.
    #[must_use]
    pub fn result(&self) -> u64 {
        self.0.regs[0]
    }

    /// Its third argument.
    #[must_use]
    pub fn third_argument(&self) -> u64 {
        self.0.regs[2]
    }
}
