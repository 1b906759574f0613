//! x86-64: `struct rt_sigframe` and `struct sigcontext_64` (arch/x86/include/asm/sigframe.h, uapi/asm/sigcontext.h), `struct _fpx_sw_bytes`,
//! and what the registers of a stopped thread say.

use std::io;

use super::Pending;
use crate::inject::parked::SystemCall;
use crate::inject::refusal::{Failed, Unfit};
use crate::machine::stopped::{Registers, register_set};

pub use super::software::of_this_machine as software;

/// `mov $15, %rax; syscall` as glibc has it, and with a 32-bit register as musl and others do: the call of `rt_sigreturn`.
pub const TRAMPOLINES: &[&[u8]] = &[&[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05], &[0xb8, 15, 0, 0, 0, 0x0f, 0x05]];
/// `AUDIT_ARCH_X86_64`.
pub const AUDIT_ARCH: u32 = 0xc000_003e;
/// Bytes below a stack pointer that a function may use without moving it (System V ABI).
pub const RED_ZONE_BYTES: u64 = 128;
/// How far above a multiple of 16 the stack pointer is at a function's entry: the return address lies there.
pub const AT_ENTRY: u64 = 8;
/// Start of `sw_reserved` in the xsave area's legacy region.
pub(super) const SOFTWARE_AT: usize = 464;
/// Its length.
pub const SOFTWARE_BYTES: usize = 48;
/// `FP_XSTATE_MAGIC1` and `FP_XSTATE_MAGIC2`.
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;
/// Legacy region and header of an xsave area; the largest: AMX has 11 KiB.
const XSAVE_BYTES_MIN: usize = 576;
const XSAVE_BYTES_MAX: usize = 16 << 10;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS` (uapi/asm/ucontext.h).
const FLAG_XSTATE: u64 = 1;
const FLAGS_SEGMENT: u64 = 2 | 4;
/// Interrupts on, and the bit that is always set: no direction, no trap.
const FLAGS_AT_ENTRY: u64 = 0x202;
/// Trap, direction and resume flag: not for the trampoline.
pub const FLAGS_CLEARED: u64 = 0x1_0500;
/// Bytes of a frame without what follows the mask, which `rt_sigreturn` does not read.
pub const FRAME_BYTES: usize = 8 + 16 + 24 + 256 + 8;
/// The note of the xsave area (uapi/linux/elf.h).
const NT_X86_XSTATE: usize = 0x202;
/// `XFEATURE_XTILE_DATA` in the header's bit vector.
const AMX: u64 = 1 << 18;
const XSAVE_HEADER_AT: usize = 512;
/// The segment of 64-bit user code (`__USER_CS`).
const LONG_MODE: u16 = 0x33;
/// Results by which a system call asks to be restarted (include/linux/errno.h).
const RESTARTSYS: i64 = -512;
const RESTARTNOINTR: i64 = -513;
const RESTARTNOHAND: i64 = -514;
const RESTART_BLOCK: i64 = -516;
/// Length of `syscall`.
const SYSCALL_BYTES: u64 = 2;

/// The registers of a stopped thread that a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// By DWARF number.
    pub general: [u64; 16],
    /// Instruction pointer.
    pub pc: u64,
    /// Flags.
    pub flags: u64,
    /// Code and stack segment.
    pub segments: [u16; 2],
}

/// DWARF number of the stack pointer.
pub const STACK_POINTER: usize = 7;
/// DWARF number of the frame pointer.
pub const FRAME_POINTER: usize = 6;
/// DWARF number of the register with a call's return address: there is none.
pub const LINK: Option<usize> = None;
/// DWARF numbers of the registers that carry arguments, in order (System V ABI).
pub const ARGUMENT_REGISTERS: [usize; 6] = [5, 4, 1, 2, 8, 9];

/// The part of a signal frame's xsave area that only the kernel knows how to fill: taken from a signal frame of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Software(pub [u8; SOFTWARE_BYTES]);

impl Software {
    /// Bytes of the xsave area, if this is of the known form.
    #[must_use]
    pub fn xsave_bytes(&self) -> Option<usize> {
        let word = |at: usize| self.0.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        let bytes = word(16)? as usize;
        (word(0)? == MAGIC_1 && (XSAVE_BYTES_MIN..=XSAVE_BYTES_MAX).contains(&bytes)).then_some(bytes)
    }
}

/// What lies outside a frame: the xsave area, given as ptrace does, in the standard format. `None` if it is not of the known form.
#[must_use]
pub fn area(software: &Software, floating: &[u8]) -> Option<Vec<u8>> {
    let mut area = floating.get(..software.xsave_bytes()?)?.to_vec();
    area.get_mut(SOFTWARE_AT..SOFTWARE_AT + SOFTWARE_BYTES)?.copy_from_slice(&software.0);
    area.extend(MAGIC_2.to_le_bytes());
    Some(area)
}

/// The registers with which a function begins. Its return address lies at the stack pointer.
#[must_use]
pub fn at_entry(thread: &Context, function: u64, stack_pointer: u64, _return_address: u64) -> Context {
    let mut called = Context { flags: FLAGS_AT_ENTRY, pc: function, ..*thread };
    called.general[STACK_POINTER] = stack_pointer;
    called.general[FRAME_POINTER] = 0;
    called.general[0] = 0;
    called
}

/// A signal frame: return address, `struct ucontext` with registers, and mask. `saved`: the address of the xsave area, and its contents; without
/// it the floating-point registers are as at a program's start.
#[must_use]
pub fn frame(context: &Context, mask: u64, saved: Option<(u64, &[u8])>, trampoline: u64) -> Vec<u8> {
    let xsave_at = saved.map_or(0, |(area_at, _)| area_at);
    let [ax, dx, cx, bx, si, di, bp, sp, r8, r9, r10, r11, r12, r13, r14, r15] = context.general;
    let flags = FLAGS_SEGMENT | if xsave_at == 0 { 0 } else { FLAG_XSTATE };
    let [code, stack] = context.segments.map(u64::from);
    let words: [u64; FRAME_BYTES / 8] = [
        trampoline,
        flags,
        0,
        // The alternate stack: address, flags, size.
        0,
        super::STACK_FLAGS_INVALID.into(),
        0,
        r8,
        r9,
        r10,
        r11,
        r12,
        r13,
        r14,
        r15,
        di,
        si,
        bp,
        bx,
        dx,
        ax,
        cx,
        sp,
        context.pc,
        context.flags,
        // cs, gs, fs, ss: 16 bits each.
        code | stack << 48,
        // err, trapno, oldmask, cr2: not read.
        0,
        0,
        0,
        0,
        xsave_at,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
        mask,
    ];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The registers of a stopped thread, with which it would go on.
#[must_use]
pub fn context(registers: &Registers) -> Context {
    Context { general: registers.general(), pc: registers.pc(), flags: registers.flags(), segments: registers.segments() }
}

/// The same for a thread that stands at a system call's end, given what it had when the call was interrupted first.
#[must_use]
pub fn context_at_exit(registers: &Registers, _before: &Registers) -> Context {
    context(registers)
}

/// The system call in which a stopped thread is.
#[must_use]
pub fn system_call(registers: &Registers) -> SystemCall {
    let [_, rdx, _, _, rsi, rdi, _, _, r8, r9, r10, ..] = registers.general();
    SystemCall { number: registers.call().cast_signed(), arguments: [rdi, rsi, rdx, r10, r8, r9] }
}

/// How it goes on: the kernel has not changed the registers yet.
#[must_use]
pub fn pending(registers: &Registers, _pid: i32) -> Pending {
    match registers.result().cast_signed() {
        RESTARTSYS | RESTARTNOINTR | RESTARTNOHAND => Pending::Restarts,
        RESTART_BLOCK => Pending::RestartsForRest,
        result if (RESTART_BLOCK..RESTARTSYS).contains(&result) => Pending::Unknown,
        result => Pending::Returned { is_interrupted: result == -i64::from(libc::EINTR) },
    }
}

/// What the kernel would do on its way back to the program, so that the call begins again.
pub fn restart(thread: &mut Context, registers: &Registers) {
    thread.general[0] = registers.call();
    thread.pc -= SYSCALL_BYTES;
}

/// The thread pointer.
///
/// # Errors
/// None.
pub fn thread_pointer(_tid: i32, registers: &Registers) -> io::Result<u64> {
    Ok(registers.thread_pointer())
}

/// The floating-point and vector registers of a stopped thread: its xsave area.
///
/// # Errors
/// The system's.
pub fn floating(tid: i32) -> io::Result<Vec<u8>> {
    register_set(tid, NT_X86_XSTATE, XSAVE_BYTES_MAX)
}

/// Whether the state of a stopped thread is one that the frames can restore.
///
/// # Errors
/// Why not.
pub fn check(_tid: i32, registers: &Registers, floating: &[u8]) -> Result<(), Failed> {
    if registers.segments()[0] != LONG_MODE {
        return Err(Unfit::NotLongMode.into());
    }
    let in_use = floating.get(XSAVE_HEADER_AT..XSAVE_HEADER_AT + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes);
    if in_use & AMX != 0 { Err(Unfit::Amx.into()) } else { Ok(()) }
}

/// For tests.
#[cfg(test)]
pub mod testing {
    use super::{Context, MAGIC_1, SOFTWARE_BYTES, STACK_POINTER, Software};

    /// For an xsave area of this size.
    pub fn software(bytes: u32) -> Software {
        let mut words = [0; SOFTWARE_BYTES];
        words[..4].copy_from_slice(&MAGIC_1.to_le_bytes());
        words[16..20].copy_from_slice(&bytes.to_le_bytes());
        Software(words)
    }

    /// With a different number in each register.
    pub fn thread(pointer: u64) -> Context {
        let mut general = [0; 16];
        (0..16).for_each(|n| general[n] = 0x1000 + n as u64);
        general[STACK_POINTER] = pointer;
        Context { general, pc: 0x4000, flags: 0x246, segments: [0x33, 0x2b] }
    }
}
