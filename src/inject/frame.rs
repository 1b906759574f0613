//! The two signal frames that make a thread call a function and then go on as it was. Pure.
//!
//! ```text
//! thread's stack pointer ─→ ┌───────────────────────────────┐ high
//!                           │ red zone (x86-64: 128 bytes)  │
//!                           ├───────────────────────────────┤ 64-byte aligned
//!                           │ x86-64: the thread's xsave    │←─┐
//!                           │ area                          │  │
//!                           ├───────────────────────────────┤  │
//!                           │ texts of the arguments        │  │
//!                           ├───────────────────────────────┤  │
//!                       ┌─→ │ frame B: the thread, as it was│──┘
//!                       │   ├───────────────────────────────┤   ↑ the call's stack begins here, at B, and it
//!                       │   │ canary                        │   │ returns into the trampoline: B's first word
//!                       │   ├───────────────────────────────┤     on x86-64, the link register on arm64
//!                       └───│ frame A: the function         │
//! committed stack pointer ─→└───────────────────────────────┘ low
//! ```
//!
//! The registers that commit the call set the instruction pointer to the C library's or the kernel's `rt_sigreturn` trampoline and the stack
//! pointer to A, as if a signal handler had just returned. The kernel loads A: the function runs, with all signals blocked that nothing in it
//! raises. It returns into the trampoline with the stack pointer at B, and the kernel loads B: the thread goes on. Nothing of the thread is
//! needed for this from outside once the registers are set, and no memory above the red zone is written.
//!
//! A frame's own layout is the machine's: [`machine::frame`].

use super::machine::{self, AT_ENTRY, Context, FRAME_BYTES, RED_ZONE_BYTES, STACK_POINTER, Software};
use super::refusal::Unfit;

/// Bytes that must be left on the stack below the frames, for the function itself.
pub const CALL_BYTES: u64 = 16 << 10;
/// Arguments of a call, in registers.
pub const ARGUMENTS_MAX: usize = machine::ARGUMENT_REGISTERS.len();
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
    /// Its floating-point and vector registers, as ptrace gives them.
    pub floating: &'a [u8],
}

/// Lays the frames out below the thread's stack pointer, on a stack that begins at `low`.
///
/// # Errors
/// If the stack has not enough room, or the floating-point registers are not of the known form.
pub fn lay_out(
    thread: &Restored<'_>,
    software: &Software,
    function: u64,
    arguments: &[Argument],
    trampoline: u64,
    low: u64,
) -> Result<Frames, Unfit> {
    let area = machine::area(software, thread.floating).ok_or(Unfit::StackUnreadable)?;
    let pointer = thread.context.general[STACK_POINTER];
    let area_room = (area.len() as u64).next_multiple_of(64);
    let texts: Vec<u8> = arguments.iter().filter_map(text_of).flat_map(|text| text.iter().copied().chain([0])).collect();
    if texts.len() > TEXTS_BYTES_MAX || arguments.len() > ARGUMENTS_MAX {
        return Err(Unfit::SmallStack);
    }
    // The largest that all of it can be: nothing below can underflow after this.
    let most = RED_ZONE_BYTES + 64 + area_room + texts.len() as u64 + 2 * (FRAME_BYTES as u64 + 32) + CANARY_BYTES as u64;
    if pointer < low || pointer - low < most + CALL_BYTES {
        return Err(Unfit::SmallStack);
    }
    let top = (pointer - RED_ZONE_BYTES) & !63;
    let area_at = top - area_room;
    let texts_at = area_at - texts.len() as u64;
    let below = |end: u64| ((end - FRAME_BYTES as u64 - AT_ENTRY) & !15) + AT_ENTRY;
    let b = below(texts_at);
    let canary = b - CANARY_BYTES as u64;
    let a = below(canary);
    let mut frames = Frames { start: a, bytes: vec![0; (top - a) as usize], stack_pointer: a + AT_ENTRY, canary };

    let mut called = machine::at_entry(thread.context, function, b, trampoline);
    let mut text_at = texts_at;
    for (argument, register) in arguments.iter().zip(machine::ARGUMENT_REGISTERS) {
        called.general[register] = match argument {
            Argument::Number(number) => *number,
            Argument::Text(text) => {
                let at = text_at;
                text_at += text.len() as u64 + 1;
                at
            }
        };
    }
    frames.put(a, &machine::frame(&called, call_mask(), None, trampoline));
    frames.put(canary, &[CANARY.to_le_bytes(); CANARY_BYTES / 8].concat());
    frames.put(b, &machine::frame(thread.context, thread.mask, Some((area_at, thread.floating)), trampoline));
    frames.put(texts_at, &texts);
    frames.put(area_at, &area);
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::machine::testing::{software, thread};
    use super::*;

    #[cfg(target_arch = "x86_64")]
    fn word(frames: &Frames, address: u64) -> u64 {
        let at = (address - frames.start) as usize;
        u64::from_le_bytes(frames.bytes[at..at + 8].try_into().unwrap())
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_frames_lead_from_the_trampoline_to_the_function_and_back_to_the_thread() {
        let context = thread(0x7fff_0010_0018);
        let xsave = vec![0xaa; 2696];
        let restored = Restored { context: &context, mask: 0x1000, floating: &xsave };
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
        assert_eq!(word(&frames, xsave_at + 2696) as u32, 0x4650_5845);
        assert_eq!(word(&frames, xsave_at + 464) as u32, 0x4650_5853);
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
    #[cfg(target_arch = "x86_64")]
    fn a_small_stack_and_an_unknown_xsave_area_are_refused() {
        let context = thread(0x10_0000);
        let xsave = vec![0; 832];
        let restored = Restored { context: &context, mask: 0, floating: &xsave };
        let lay = |software, low| lay_out(&restored, &software, 1, &[], 2, low).map(drop);
        assert_eq!(lay(software(832), 0x10_0000 - (24 << 10)), Ok(()));
        assert_eq!(lay(software(832), 0x10_0000 - (16 << 10)), Err(Unfit::SmallStack));
        assert_eq!(lay(software(832), 0x20_0000), Err(Unfit::SmallStack));
        assert_eq!(lay(software(840), 0), Err(Unfit::StackUnreadable), "the thread's area is smaller");
        assert_eq!(lay(Software([0; machine::SOFTWARE_BYTES]), 0), Err(Unfit::StackUnreadable));
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
            let restored = Restored { context: &context, mask: 0, floating: &xsave };
            let low = pointer - room;
            if let Ok(frames) = lay_out(&restored, &software(xsave_bytes as u32), 1, &[Argument::Text(text)], 2, low) {
                prop_assert!(frames.start >= low + CALL_BYTES);
                prop_assert!(frames.start + frames.bytes.len() as u64 <= pointer - RED_ZONE_BYTES);
                prop_assert_eq!(frames.start % 16, AT_ENTRY);
                prop_assert_eq!(frames.stack_pointer, frames.start + AT_ENTRY);
            }
        }
    }
}
