//! arm64: `struct rt_sigframe` (arch/arm64/kernel/signal.c), `struct ucontext` and `struct sigcontext` (uapi/asm/ucontext.h, sigcontext.h),
//! and what the registers of a stopped thread say.
//!
//! Of the vector registers a frame has the 128 bits that `fpsimd_context` holds. What SVE has beyond them, no thread in a system call has: they
//! are not preserved across one, and streaming mode ends at its entry (Documentation/arch/arm64/sve.rst, sme.rst). ZA is preserved, so a thread
//! that uses it is left alone.

use std::io;

use super::{Pending, STACK_FLAGS_INVALID};
use crate::inject::memory;
use crate::inject::parked::SystemCall;
use crate::inject::refusal::{Failed, Refusal, Unfit};
use crate::machine::stopped::{Registers, register_set};

/// `mov x8, #139; svc #0`: the call of `rt_sigreturn`, in the kernel's own object (arch/arm64/kernel/vdso/sigreturn.S) or in musl.
pub const TRAMPOLINES: &[&[u8]] = &[&[0x68, 0x11, 0x80, 0xd2, 0x01, 0x00, 0x00, 0xd4]];
/// `AUDIT_ARCH_AARCH64`.
pub const AUDIT_ARCH: u32 = 0xc000_00b7;
/// There is no red zone (AAPCS64, 6.4.5).
pub const RED_ZONE_BYTES: u64 = 0;
/// The stack pointer is always a multiple of 16; the return address is in a register.
pub const AT_ENTRY: u64 = 0;
/// `struct siginfo`, which `rt_sigreturn` does not read.
const SIGINFO_BYTES: usize = 128;
/// Flags, link and alternate stack; the mask, with room for 1,024 signals, and up to a multiple of 16.
const MASK_AT: usize = SIGINFO_BYTES + 40;
const SIGCONTEXT_AT: usize = SIGINFO_BYTES + 176;
/// Fault address, 31 registers, stack pointer, instruction pointer, flags; up to a multiple of 16.
const RECORDS_AT: usize = SIGCONTEXT_AT + 288;
/// `struct fpsimd_context`, with its magic number.
const FPSIMD_BYTES: usize = 528;
const FPSIMD_MAGIC: u32 = 0x4650_8001;
/// The 32 registers, in it and in `struct user_fpsimd_state` (uapi/asm/ptrace.h), which has the two control registers after them.
const VECTORS_BYTES: usize = 512;
const FLOATING_BYTES: usize = VECTORS_BYTES + 16;
/// Bytes of a frame up to the empty record that ends the list.
pub const FRAME_BYTES: usize = RECORDS_AT + FPSIMD_BYTES + 16;
/// Condition flags, of which a function expects nothing.
const CONDITIONS: u64 = 0xf000_0000;
/// Type of the last branch, single step, illegal state (`PSR_BTYPE_MASK`, `DBG_SPSR_SS`, `PSR_IL_BIT`): not for the trampoline.
pub const FLAGS_CLEARED: u64 = 3 << 10 | 1 << 21 | 1 << 20;
/// Notes (uapi/linux/elf.h).
const NT_PRFPREG: usize = 2;
const NT_ARM_TLS: usize = 0x401;
const NT_ARM_ZA: usize = 0x40c;
const NT_ARM_GCS: usize = 0x410;
/// `struct user_za_header`, whose first member is the size of all there is: with no more than this, ZA is off.
const ZA_HEADER_BYTES: usize = 16;
/// `PR_SHADOW_STACK_ENABLE`, the first word of `struct user_gcs`.
const SHADOW_STACK: u64 = 1;
/// `svc #0`.
const SVC: u32 = 0xd400_0001;
const SVC_BYTES: u64 = 4;
/// Results by which a system call asks to be restarted (include/linux/errno.h).
const RESTARTSYS: i64 = -512;
const RESTART_BLOCK: i64 = -516;

/// The registers of a stopped thread that a frame holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// By DWARF number: x0 to x30, sp.
    pub general: [u64; 32],
    /// Instruction pointer.
    pub pc: u64,
    /// Flags: `PSTATE`.
    pub flags: u64,
}

/// DWARF number of the stack pointer.
pub const STACK_POINTER: usize = 31;
/// DWARF number of the frame pointer.
pub const FRAME_POINTER: usize = 29;
/// DWARF number of the register with a call's return address.
pub const LINK: Option<usize> = Some(30);
/// DWARF numbers of the registers that carry arguments, in order (AAPCS64).
pub const ARGUMENT_REGISTERS: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// A frame has nothing that only the kernel can fill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Software;

/// Always known.
#[must_use]
pub fn software() -> Option<Software> {
    Some(Software)
}

/// Nothing lies outside a frame. `None` if the vector registers are not of the known form.
#[must_use]
pub fn area(_software: &Software, floating: &[u8]) -> Option<Vec<u8>> {
    (floating.len() >= FLOATING_BYTES).then(Vec::new)
}

/// The registers with which a function begins.
#[must_use]
pub fn at_entry(thread: &Context, function: u64, stack_pointer: u64, return_address: u64) -> Context {
    let mut called = Context { flags: thread.flags & !(CONDITIONS | FLAGS_CLEARED), pc: function, ..*thread };
    called.general[STACK_POINTER] = stack_pointer;
    called.general[FRAME_POINTER] = 0;
    called.general[30] = return_address;
    called
}

/// A signal frame: `struct ucontext` with the mask, the registers and the vector registers. `saved`: no address, and the vector registers as
/// ptrace gives them; without them they are zero, and the arithmetic is as at a program's start.
#[must_use]
pub fn frame(context: &Context, mask: u64, saved: Option<(u64, &[u8])>, _trampoline: u64) -> Vec<u8> {
    let mut frame = vec![0; FRAME_BYTES];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(place) = frame.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    };
    // The alternate stack: address, flags, size.
    put(SIGINFO_BYTES + 24, &STACK_FLAGS_INVALID.to_le_bytes());
    put(MASK_AT, &mask.to_le_bytes());
    let registers = context.general.iter().chain([&context.pc, &context.flags]);
    put(SIGCONTEXT_AT + 8, &registers.flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>());
    put(RECORDS_AT, &FPSIMD_MAGIC.to_le_bytes());
    put(RECORDS_AT + 4, &(FPSIMD_BYTES as u32).to_le_bytes());
    if let Some((vectors, control)) = saved.and_then(|(_, floating)| floating.split_at_checked(VECTORS_BYTES)) {
        put(RECORDS_AT + 8, control.get(..8).unwrap_or_default());
        put(RECORDS_AT + 16, vectors);
    }
    frame
}

/// The registers of a stopped thread, with which it would go on.
#[must_use]
pub fn context(registers: &Registers) -> Context {
    Context { general: registers.general(), pc: registers.pc(), flags: registers.flags() }
}

/// The same for a thread that stands at a system call's end, given what it had when the call was interrupted first: there the kernel shows in
/// x7 that it is an end (arch/arm64/kernel/ptrace.c, report_syscall), and has put the restart's number into x8.
#[must_use]
pub fn context_at_exit(registers: &Registers, before: &Registers) -> Context {
    let mut context = context(registers);
    for number in [7, 8] {
        context.general[number] = before.general()[number];
    }
    context
}

/// The system call in which a stopped thread is.
#[must_use]
pub fn system_call(registers: &Registers) -> SystemCall {
    let [x0, x1, x2, x3, x4, x5, ..] = registers.general();
    SystemCall { number: registers.call().cast_signed(), arguments: [x0, x1, x2, x3, x4, x5] }
}

/// How it goes on. The kernel has already prepared that: a call that begins again has its first argument and stands at its own instruction,
/// whether for its rest or not (arch/arm64/kernel/signal.c, do_signal).
#[must_use]
pub fn pending(registers: &Registers, pid: i32) -> Pending {
    let is_svc = |address: u64| {
        let mut code = [0; 4];
        memory::read(pid, address, &mut code) == code.len() && u32::from_le_bytes(code) == SVC
    };
    match registers.result().cast_signed() {
        _ if is_svc(registers.pc()) => Pending::Restarts,
        // The restart of an end that was waited for.
        RESTART_BLOCK..=RESTARTSYS => Pending::Unknown,
        result if is_svc(registers.pc().wrapping_sub(SVC_BYTES)) => Pending::Returned { is_interrupted: result == -i64::from(libc::EINTR) },
        _ => Pending::Unknown,
    }
}

/// The kernel has done so.
pub fn restart(_thread: &mut Context, _registers: &Registers) {}

/// The thread pointer.
///
/// # Errors
/// The system's.
pub fn thread_pointer(tid: i32, _registers: &Registers) -> io::Result<u64> {
    let bytes = register_set(tid, NT_ARM_TLS, 16)?;
    bytes.first_chunk().map(|word| u64::from_le_bytes(*word)).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// The floating-point and vector registers of a stopped thread: `struct user_fpsimd_state`.
///
/// # Errors
/// The system's.
pub fn floating(tid: i32) -> io::Result<Vec<u8>> {
    register_set(tid, NT_PRFPREG, FLOATING_BYTES)
}

/// Whether the state of a stopped thread is one that the frames can restore. A set of registers that the machine or the kernel lacks is none.
///
/// # Errors
/// Why not.
pub fn check(tid: i32, registers: &Registers, _floating: &[u8]) -> Result<(), Failed> {
    if !registers.is_64_bit() {
        return Err(Unfit::NotLongMode.into());
    }
    let za = register_set(tid, NT_ARM_ZA, ZA_HEADER_BYTES).ok().and_then(|bytes| bytes.first_chunk().map(|size| u32::from_le_bytes(*size)));
    if za.is_some_and(|bytes| bytes as usize > ZA_HEADER_BYTES) {
        return Err(Unfit::Za.into());
    }
    let features = register_set(tid, NT_ARM_GCS, 24).ok().and_then(|bytes| bytes.first_chunk().map(|word| u64::from_le_bytes(*word)));
    if features.is_some_and(|features| features & SHADOW_STACK != 0) { Err(Refusal::ShadowStack.into()) } else { Ok(()) }
}

/// For tests.
#[cfg(test)]
pub mod testing {
    use super::{Context, STACK_POINTER, Software};

    /// The same for each size.
    pub fn software(_bytes: u32) -> Software {
        Software
    }

    /// With a different number in each register.
    pub fn thread(pointer: u64) -> Context {
        let mut general = [0; 32];
        (0..32).for_each(|n| general[n] = 0x1000 + n as u64);
        general[STACK_POINTER] = pointer;
        Context { general, pc: 0x4000, flags: 0x8000_1000 }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The offsets are those that a C compiler for arm64 gives: `offsetof(struct rt_sigframe, uc.uc_mcontext.regs[0])` and so on.
    #[test]
    fn a_frame_has_its_members_where_the_kernel_reads_them() {
        let context = testing::thread(0x7fff_0000);
        let mut floating = vec![0; FLOATING_BYTES];
        floating[..16].copy_from_slice(&[0xaa; 16]);
        floating[496..512].copy_from_slice(&[0xbb; 16]);
        floating[512..516].copy_from_slice(&7u32.to_le_bytes());
        floating[516..520].copy_from_slice(&9u32.to_le_bytes());
        let bytes = frame(&context, 0x1234, Some((0, &floating)), 0);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((word(128), word(136), word(144), word(152) as u32, word(160)), (0, 0, 0, STACK_FLAGS_INVALID, 0));
        assert_eq!((word(168), word(304)), (0x1234, 0));
        assert_eq!((word(312), word(312 + 30 * 8)), (0x1000, 0x101e));
        assert_eq!((word(560), word(568), word(576)), (0x7fff_0000, 0x4000, 0x8000_1000));
        assert_eq!((word(592) as u32, word(592) >> 32, word(600)), (FPSIMD_MAGIC, 528, 9 << 32 | 7));
        assert_eq!((bytes[608], bytes[608 + 511], word(1120)), (0xaa, 0xbb, 0));
        assert_eq!((bytes.len(), bytes.len() % 16), (1136, 0));
        let clean = frame(&context, 0, None, 0);
        assert_eq!((clean[592..600] == bytes[592..600], clean[600..1120].iter().all(|&byte| byte == 0)), (true, true));
    }

    #[test]
    fn a_function_begins_with_its_return_address_in_the_link_register() {
        let called = at_entry(&Context { flags: 0xf020_0c01, ..testing::thread(0x8000) }, 0x5000, 0x7000, 0x6000);
        assert_eq!((called.pc, called.general[31], called.general[30], called.general[29]), (0x5000, 0x7000, 0x6000, 0));
        assert_eq!((called.flags, called.general[19]), (1, 0x1013));
    }
}
