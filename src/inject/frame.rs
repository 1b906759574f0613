//! The two signal frames that make a thread call a function and then go on as it was. Pure; x86-64.
//!
//! ```text
//! thread's stack pointer ─→ ┌───────────────────────────────┐ high
//!                           │ red zone, 128 bytes           │
//!                           ├───────────────────────────────┤ 64-byte aligned
//!                           │ the thread's xsave area       │←─┐
//!                           ├───────────────────────────────┤  │
//!                           │ texts of the arguments        │  │
//!                           ├───────────────────────────────┤  │
//!                       ┌─→ │ frame B: the thread, as it was│──┘
//!                       │   ├───────────────────────────────┤   ↑ the call's stack begins here, at B
//!                       │   │ canary                        │   │ its first word is the call's return address,
//!                       │   ├───────────────────────────────┤     which is B's own: the trampoline
//!                       └───│ frame A: the function         │
//! committed stack pointer ─→└───────────────────────────────┘ low
//! ```
//!
//! The registers that commit the call set the instruction pointer to the C library's `rt_sigreturn` trampoline and the stack pointer to A,
//! as if a signal handler had just returned. The kernel loads A: the function runs, with all signals blocked that nothing in it raises. It
//! returns into the trampoline with B on the stack, and the kernel loads B: the thread goes on. Nothing of the thread is needed for this
//! from outside once the registers are set, and no memory above the red zone is written.
//!
//! Layouts: `struct rt_sigframe` and `struct sigcontext_64` (arch/x86/include/asm/sigframe.h, uapi/asm/sigcontext.h), `struct _fpx_sw_bytes`.

use super::refusal::Unfit;

/// Bytes below a stack pointer that a function may use without moving it (System V ABI).
const RED_ZONE_BYTES: u64 = 128;
/// Bytes that must be left on the stack below the frames, for the function itself.
pub const CALL_BYTES: u64 = 16 << 10;
/// Arguments of a call, in registers.
pub const ARGUMENTS_MAX: usize = 6;
/// Bytes of all text arguments.
const TEXTS_BYTES_MAX: usize = 4096;
/// Bytes of the canary, on which the function's own frame comes to lie. Not each function writes the first word: the dlopen of glibc 2.43 and
/// of 2.31's libdl makes room for its frame, whose uppermost word is padding.
pub const CANARY_BYTES: usize = 512;
/// The canary's words.
const CANARY: u64 = 0x666f_7270_6761_7266;

/// Whether nothing has been written on the canary, given what is there.
#[must_use]
pub fn is_canary(bytes: &[u8; CANARY_BYTES]) -> bool {
    bytes.chunks_exact(8).all(|word| word == CANARY.to_le_bytes())
}
/// Start of `sw_reserved` in the xsave area's legacy region.
pub(super) const SOFTWARE_AT: usize = 464;
/// Its length.
pub const SOFTWARE_BYTES: usize = 48;
/// `FP_XSTATE_MAGIC1` and `FP_XSTATE_MAGIC2`.
const MAGIC_1: u32 = 0x4650_5853;
const MAGIC_2: u32 = 0x4650_5845;
/// Legacy region and header of an xsave area.
const XSAVE_BYTES_MIN: usize = 576;
const XSAVE_BYTES_MAX: usize = 16 << 10;
/// `UC_FP_XSTATE`, `UC_SIGCONTEXT_SS`, `UC_STRICT_RESTORE_SS` (uapi/asm/ucontext.h).
const FLAG_XSTATE: u64 = 1;
const FLAGS_SEGMENT: u64 = 2 | 4;
/// Not a mode of sigaltstack(2): the kernel then leaves the alternate stack as it is (kernel/signal.c, restore_altstack).
const STACK_FLAGS_INVALID: u32 = 0x1_2345;
/// Interrupts on, and the bit that is always set: no direction, no trap.
const FLAGS_AT_ENTRY: u64 = 0x202;
/// Bytes of a frame without what follows the mask, which `rt_sigreturn` does not read.
const FRAME_BYTES: usize = 8 + 16 + 24 + 256 + 8;

/// Signals that a fault in the call itself raises: they stay open, so that a fault is reported as it would be.
const FAULTS: [i32; 7] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS];

/// The mask during a call. It has the C library's own signals 32 and 33, which no mask of a program has: so a running call is recognised
/// by it.
#[must_use]
pub fn call_mask() -> u64 {
    FAULTS.iter().fold(!0, |mask, signal| mask & !bit(*signal)) & !bit(libc::SIGKILL) & !bit(libc::SIGSTOP)
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

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
/// DWARF numbers of the registers that carry arguments, in order (System V ABI).
const ARGUMENT_REGISTERS: [usize; ARGUMENTS_MAX] = [5, 4, 1, 2, 8, 9];

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

/// An argument of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Argument {
    /// A number.
    Number(u64),
    /// The address of this text, with a zero byte after it.
    Text(Vec<u8>),
}

/// The frames, as they are written to the thread's stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frames {
    /// Address of the first byte.
    pub start: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The stack pointer that commits the call, with the trampoline as the instruction pointer.
    pub stack_pointer: u64,
    /// Address of the canary, of which the function overwrites a part when it begins.
    pub canary: u64,
}

/// A thread's state to be restored.
#[derive(Debug, Clone, Copy)]
pub struct Restored<'a> {
    /// Its registers, with the system call set up to be restarted.
    pub context: &'a Context,
    /// Its signal mask.
    pub mask: u64,
    /// Its xsave area in the standard format, as ptrace gives it.
    pub xsave: &'a [u8],
}

/// Lays the frames out below the thread's stack pointer, on a stack that begins at `low`.
///
/// # Errors
/// If the stack has not enough room, or the xsave area is not of the known form.
pub fn lay_out(
    thread: &Restored<'_>,
    software: &Software,
    function: u64,
    arguments: &[Argument],
    trampoline: u64,
    low: u64,
) -> Result<Frames, Unfit> {
    let xsave_bytes = software.xsave_bytes().filter(|&bytes| bytes <= thread.xsave.len()).ok_or(Unfit::StackUnreadable)?;
    let pointer = thread.context.general[STACK_POINTER];
    let xsave_room = (xsave_bytes as u64 + 4).next_multiple_of(64);
    let texts: Vec<u8> = arguments.iter().filter_map(text_of).flat_map(|text| text.iter().copied().chain([0])).collect();
    if texts.len() > TEXTS_BYTES_MAX || arguments.len() > ARGUMENTS_MAX {
        return Err(Unfit::SmallStack);
    }
    // The largest that all of it can be: nothing below can underflow after this.
    let most = RED_ZONE_BYTES + 64 + xsave_room + texts.len() as u64 + 2 * (FRAME_BYTES as u64 + 32) + CANARY_BYTES as u64;
    if pointer < low || pointer - low < most + CALL_BYTES {
        return Err(Unfit::SmallStack);
    }
    let top = (pointer - RED_ZONE_BYTES) & !63;
    let xsave_at = top - xsave_room;
    let texts_at = xsave_at - texts.len() as u64;
    // At a function's entry the stack pointer is 8 above a multiple of 16.
    let below = |end: u64| ((end - FRAME_BYTES as u64 - 8) & !15) + 8;
    let b = below(texts_at);
    let canary = b - CANARY_BYTES as u64;
    let a = below(canary);
    let mut frames = Frames { start: a, bytes: vec![0; (top - a) as usize], stack_pointer: a + 8, canary };

    let mut called = Context { flags: FLAGS_AT_ENTRY, pc: function, ..*thread.context };
    called.general[STACK_POINTER] = b;
    called.general[FRAME_POINTER] = 0;
    called.general[0] = 0;
    let mut text_at = texts_at;
    for (argument, register) in arguments.iter().zip(ARGUMENT_REGISTERS) {
        called.general[register] = match argument {
            Argument::Number(number) => *number,
            Argument::Text(text) => {
                let at = text_at;
                text_at += text.len() as u64 + 1;
                at
            }
        };
    }
    frames.put(a, &frame(&called, call_mask(), 0, trampoline));
    frames.put(canary, &[CANARY.to_le_bytes(); CANARY_BYTES / 8].concat());
    frames.put(b, &frame(thread.context, thread.mask, xsave_at, trampoline));
    frames.put(texts_at, &texts);
    frames.put(xsave_at, thread.xsave.get(..xsave_bytes).unwrap_or_default());
    frames.put(xsave_at + SOFTWARE_AT as u64, &software.0);
    frames.put(xsave_at + xsave_bytes as u64, &MAGIC_2.to_le_bytes());
    Ok(frames)
}

fn text_of(argument: &Argument) -> Option<&Vec<u8>> {
    match argument {
        Argument::Text(text) => Some(text),
        Argument::Number(_) => None,
    }
}

impl Frames {
    fn put(&mut self, address: u64, bytes: &[u8]) {
        let at = (address - self.start) as usize;
        if let Some(place) = self.bytes.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }
}

/// A signal frame: return address, `struct ucontext` with registers, and mask.
fn frame(context: &Context, mask: u64, xsave_at: u64, trampoline: u64) -> Vec<u8> {
    let [ax, dx, cx, bx, si, di, bp, sp, r8, r9, r10, r11, r12, r13, r14, r15] = context.general;
    let flags = FLAGS_SEGMENT | if xsave_at == 0 { 0 } else { FLAG_XSTATE };
    let [code, stack] = context.segments.map(u64::from);
    let words: [u64; FRAME_BYTES / 8] = [
        trampoline,
        flags,
        0,
        // The alternate stack: address, flags, size.
        0,
        STACK_FLAGS_INVALID.into(),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn software(bytes: u32) -> Software {
        let mut words = [0; SOFTWARE_BYTES];
        words[..4].copy_from_slice(&MAGIC_1.to_le_bytes());
        words[16..20].copy_from_slice(&bytes.to_le_bytes());
        Software(words)
    }

    fn thread(pointer: u64) -> Context {
        let mut general = [0; 16];
        (0..16).for_each(|n| general[n] = 0x1000 + n as u64);
        general[STACK_POINTER] = pointer;
        Context { general, pc: 0x4000, flags: 0x246, segments: [0x33, 0x2b] }
    }

    fn word(frames: &Frames, address: u64) -> u64 {
        let at = (address - frames.start) as usize;
        u64::from_le_bytes(frames.bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    fn the_frames_lead_from_the_trampoline_to_the_function_and_back_to_the_thread() {
        let context = thread(0x7fff_0010_0018);
        let xsave = vec![0xaa; 2696];
        let restored = Restored { context: &context, mask: 0x1000, xsave: &xsave };
        let arguments = [Argument::Text(b"arena.4096.purge".to_vec()), Argument::Number(7)];
        let frames = lay_out(&restored, &software(2696), 0x5000, &arguments, 0x6000, 0x7fff_0000_0000).unwrap();
        let a = frames.stack_pointer - 8;
        let field = |frame: u64, number: u64| word(&frames, frame + 8 * number);
        assert_eq!(field(a, 22), 0x5000, "the instruction pointer of A is the function's");
        let b = field(a, 21);
        assert_eq!((word(&frames, b), b % 16), (0x6000, 8), "the call returns into the trampoline, from an aligned stack");
        assert_eq!((field(a, 38), field(b, 38)), (call_mask(), 0x1000));
        assert_eq!((field(b, 22), field(b, 21), field(b, 23)), (0x4000, 0x7fff_0010_0018, 0x246));
        assert_eq!((field(b, 19), field(b, 13)), (0x1000, 0x100f), "rax and r15");
        assert_eq!((field(a, 24), field(b, 24)), (0x002b_0000_0000_0033, 0x002b_0000_0000_0033));
        let text = field(a, 14);
        let at = (text - frames.start) as usize;
        assert_eq!(&frames.bytes[at..at + 17], b"arena.4096.purge\0");
        assert_eq!(field(a, 15), 7);
        let xsave_at = field(b, 29);
        assert_eq!((xsave_at % 64, field(a, 29), field(b, 1), field(a, 1)), (0, 0, 7, 6));
        assert_eq!(word(&frames, xsave_at + 2696) as u32, MAGIC_2);
        assert_eq!(word(&frames, xsave_at + SOFTWARE_AT as u64) as u32, MAGIC_1);
        assert_eq!(frames.canary + CANARY_BYTES as u64, b);
        let at = (frames.canary - frames.start) as usize;
        let mut canary: [u8; CANARY_BYTES] = frames.bytes[at..at + CANARY_BYTES].try_into().unwrap();
        assert!(is_canary(&canary));
        // sub rsp, 72; mov [rsp + 56], rax: the first word stays.
        canary[CANARY_BYTES - 16] = 0;
        assert!(!is_canary(&canary));
        assert!(frames.start + frames.bytes.len() as u64 <= 0x7fff_0010_0018 - RED_ZONE_BYTES);
    }

    #[test]
    fn a_small_stack_and_an_unknown_xsave_area_are_refused() {
        let context = thread(0x10_0000);
        let xsave = vec![0; 832];
        let restored = Restored { context: &context, mask: 0, xsave: &xsave };
        let lay = |software, low| lay_out(&restored, &software, 1, &[], 2, low).map(drop);
        assert_eq!(lay(software(832), 0x10_0000 - (24 << 10)), Ok(()));
        assert_eq!(lay(software(832), 0x10_0000 - (16 << 10)), Err(Unfit::SmallStack));
        assert_eq!(lay(software(832), 0x20_0000), Err(Unfit::SmallStack));
        assert_eq!(lay(software(840), 0), Err(Unfit::StackUnreadable), "the thread's area is smaller");
        assert_eq!(lay(Software([0; SOFTWARE_BYTES]), 0), Err(Unfit::StackUnreadable));
    }

    #[test]
    fn the_mask_of_a_call_has_what_no_program_blocks_and_leaves_faults_open() {
        let mask = call_mask();
        assert!(mask & bit(32) != 0 && mask & bit(33) != 0 && mask & bit(libc::SIGTERM) != 0);
        assert!(FAULTS.iter().all(|&signal| mask & bit(signal) == 0));
        assert_eq!(mask & (bit(libc::SIGKILL) | bit(libc::SIGSTOP)), 0, "as the kernel shows it");
    }

    proptest! {
        #[test]
        fn no_byte_is_written_above_the_red_zone_or_near_the_end_of_the_stack(
            pointer in 0x1000_0000u64..0x7fff_ffff_0000, room in 0u64..64 << 10, xsave_bytes in 576usize..4096, text in proptest::collection::vec(1u8.., 0..300)
        ) {
            let context = thread(pointer);
            let xsave = vec![0; 8192];
            let restored = Restored { context: &context, mask: 0, xsave: &xsave };
            let low = pointer - room;
            if let Ok(frames) = lay_out(&restored, &software(xsave_bytes as u32), 1, &[Argument::Text(text)], 2, low) {
                prop_assert!(frames.start >= low + CALL_BYTES);
                prop_assert!(frames.start + frames.bytes.len() as u64 <= pointer - RED_ZONE_BYTES);
                prop_assert_eq!((frames.stack_pointer - 8) % 16, 8);
            }
        }
    }
}
