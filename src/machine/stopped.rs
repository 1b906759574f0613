//! A process stopped under ptrace: its registers, its words, and the breakpoint instruction.

use std::io;

/// The bits of the word at its address that the breakpoint instruction replaces.
pub const BREAKPOINT_MASK: u64 = if cfg!(target_arch = "aarch64") { 0xffff_ffff } else { 0xff };
/// The breakpoint instruction: `int3`, or `brk #0`.
pub const BREAKPOINT: u64 = if cfg!(target_arch = "aarch64") { 0xd420_0000 } else { 0xcc };
/// How far after a breakpoint its process stops.
pub const BREAKPOINT_PASSED_BYTES: u64 = if cfg!(target_arch = "aarch64") { 0 } else { 1 };

/// A request that takes integers, or a pointer to a struct that the caller owns and that outlives the call.
///
/// # Errors
/// The system's.
pub(crate) fn ptrace(request: libc::c_uint, pid: i32, address: u64, data: u64) -> io::Result<i64> {
    // SAFETY: the requests used take integers, or such a pointer.
    let result = unsafe { libc::ptrace(request, pid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The word at an address of a stopped child.
///
/// # Errors
/// If nothing is mapped there, or it is running.
pub(crate) fn peek(pid: i32, address: u64) -> io::Result<u64> {
    // SAFETY: errno is the calling thread's own; the request takes integers. -1 is a valid word, so only errno shows a failure.
    unsafe {
        *libc::__errno_location() = 0;
        let word = libc::ptrace(libc::PTRACE_PEEKTEXT, pid, address, 0u64);
        if word == -1 && *libc::__errno_location() != 0 { Err(io::Error::last_os_error()) } else { Ok(word as u64) }
    }
}

/// Writes the word at an address of a stopped child, also into its code.
///
/// # Errors
/// As [`peek`].
pub(crate) fn poke(pid: i32, address: u64, word: u64) -> io::Result<()> {
    ptrace(libc::PTRACE_POKETEXT, pid, address, word).map(drop)
}

/// Waits until a child stops or ends; its status as `waitpid(2)` gives it.
///
/// # Errors
/// If it is not a child, or has been waited for.
pub(crate) fn wait_for(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child and writes its status into a local.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// A set of registers of a stopped child that `note` names (uapi/linux/elf.h), up to this many bytes of it.
///
/// # Errors
/// The system's; also if the machine or the kernel does not have it.
pub(crate) fn register_set(pid: i32, note: usize, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0u8; bytes_max];
    let mut part = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    ptrace(libc::PTRACE_GETREGSET, pid, note as u64, (&raw mut part) as u64)?;
    bytes.truncate(part.iov_len);
    Ok(bytes)
}

/// The general registers.
#[derive(Clone)]
pub struct Registers(libc::user_regs_struct);

impl Registers {
    /// Those of a stopped child.
    ///
    /// # Errors
    /// If it is not a child of this thread, or is running.
    pub fn read(pid: i32) -> io::Result<Self> {
        // SAFETY: the struct is plain integers, so zeroes are a value of it.
        let mut registers = Self(unsafe { std::mem::zeroed() });
        registers.exchange(libc::PTRACE_GETREGSET, pid)?;
        Ok(registers)
    }

    /// Writes them to a stopped child.
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

    /// The general registers by DWARF number.
    #[must_use]
    pub(crate) fn general(&self) -> [u64; 16] {
        let r = &self.0;
        [r.rax, r.rdx, r.rcx, r.rbx, r.rsi, r.rdi, r.rbp, r.rsp, r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15]
    }

    /// Sets a general register by its DWARF number; numbers beyond are ignored.
    pub(crate) fn set_general(&mut self, number: u8, value: u64) {
        let r = &mut self.0;
        let registers: [&mut u64; 16] = [
            &mut r.rax, &mut r.rdx, &mut r.rcx, &mut r.rbx, &mut r.rsi, &mut r.rdi, &mut r.rbp, &mut r.rsp, &mut r.r8, &mut r.r9,
            &mut r.r10, &mut r.r11, &mut r.r12, &mut r.r13, &mut r.r14, &mut r.r15,
        ];
        if let Some(register) = registers.into_iter().nth(number.into()) {
            *register = value;
        }
    }

    /// The thread pointer: the base of the segment `fs`.
    #[must_use]
    pub(crate) fn thread_pointer(&self) -> u64 {
        self.0.fs_base
    }

    /// Sets the thread pointer.
    pub(crate) fn set_thread_pointer(&mut self, address: u64) {
        self.0.fs_base = address;
    }

    /// Whether a branch on a condition is taken: the low four bits of its opcode (Intel SDM volume 1, appendix B).
    #[must_use]
    pub(crate) fn takes(&self, condition: u8) -> bool {
        let flag = |bit: u32| self.0.eflags >> bit & 1 == 1;
        let (carry, parity, zero, sign, overflow) = (flag(0), flag(2), flag(6), flag(7), flag(11));
        let holds = match condition >> 1 & 7 {
            0 => overflow,
            1 => carry,
            2 => zero,
            3 => carry || zero,
            4 => sign,
            5 => parity,
            6 => sign != overflow,
            _ => zero || sign != overflow,
        };
        holds != (condition & 1 == 1)
    }

    /// The flags.
    #[must_use]
    pub(crate) fn flags(&self) -> u64 {
        self.0.eflags
    }

    /// Clears flags.
    pub(crate) fn clear_flags(&mut self, flags: u64) {
        self.0.eflags &= !flags;
    }

    /// The selectors of the code and the stack segment.
    #[must_use]
    pub(crate) fn segments(&self) -> [u16; 2] {
        [self.0.cs as u16, self.0.ss as u16]
    }

    /// Clears the state by which the kernel could restart a system call.
    pub(crate) fn forget_call(&mut self) {
        self.0.orig_rax = u64::MAX;
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

    /// The general registers by DWARF number.
    #[must_use]
    pub(crate) fn general(&self) -> [u64; 32] {
        let mut general = [self.0.sp; 32];
        general.iter_mut().zip(self.0.regs).for_each(|(register, value)| *register = value);
        general
    }

    /// Sets a general register by its DWARF number; numbers beyond are ignored.
    pub(crate) fn set_general(&mut self, number: u8, value: u64) {
        if let Some(register) = self.0.regs.iter_mut().chain([&mut self.0.sp]).nth(number.into()) {
            *register = value;
        }
    }

    /// The flags.
    #[must_use]
    pub(crate) fn flags(&self) -> u64 {
        self.0.pstate
    }

    /// Clears flags.
    pub(crate) fn clear_flags(&mut self, flags: u64) {
        self.0.pstate &= !flags;
    }

    /// Whether they are those of a 64-bit program (`PSR_MODE32_BIT`).
    #[must_use]
    pub(crate) fn is_64_bit(&self) -> bool {
        self.0.pstate & 0x10 == 0
    }

    /// Clears the state by which the kernel could restart a system call: it has none here, because it prepares a restart before it stops.
    pub(crate) fn forget_call(&mut self) {}
}
