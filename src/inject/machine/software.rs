//! What only the kernel knows how to write into a signal frame, taken from a frame of this process.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::x86_64::{SOFTWARE_AT, SOFTWARE_BYTES, Software};

const WORDS: usize = SOFTWARE_BYTES / 8;
static CAPTURED: [AtomicU64; WORDS] = [const { AtomicU64::new(0) }; WORDS];

/// The bytes of this machine; `None` if a signal's frame does not have them.
///
/// The size of a frame's xsave area is that of the features that a process has by default: it is not to be had from the instruction set
/// alone (AMX counts only in processes that asked for it), nor from ptrace, which gives the largest. So a signal is raised once, in the
/// calling thread, and its own frame read. Its number is the last one for programs, which nothing else here uses.
pub fn of_this_machine() -> Option<Software> {
    static FOUND: OnceLock<Option<Software>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        raise()?;
        let mut bytes = [0; SOFTWARE_BYTES];
        for (part, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(&CAPTURED) {
            *part = word.load(Ordering::Acquire).to_le_bytes();
        }
        let software = Software(bytes);
        software.xsave_bytes().map(|_| software)
    })
}

extern "C" fn capture(_signal: i32, _info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a handler with SA_SIGINFO a ucontext_t; its fpregs point to an xsave area of at least 512 bytes, or nowhere.
    // Atomic stores are allowed in a handler.
    unsafe {
        let area = (*context.cast::<libc::ucontext_t>()).uc_mcontext.fpregs.cast::<u8>();
        if area.is_null() {
            return;
        }
        for (index, word) in CAPTURED.iter().enumerate() {
            word.store(area.add(SOFTWARE_AT + index * 8).cast::<u64>().read_unaligned(), Ordering::Release);
        }
    }
}

fn raise() -> Option<()> {
    let signal = libc::SIGRTMAX();
    // SAFETY: all structures are plain integers and valid as zeroes; the handler is safe in any context; the former action and the former
    // mask are put back, and the signal is sent to this thread alone.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut former: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = capture as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
        let mut open: libc::sigset_t = std::mem::zeroed();
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut open);
        libc::sigaddset(&raw mut open, signal);
        if libc::sigaction(signal, &raw const action, &raw mut former) != 0 {
            return None;
        }
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const open, &raw mut mask);
        // An unblocked signal that a thread sends to itself is delivered before the call returns (POSIX, pthread_kill).
        let is_sent = libc::pthread_kill(libc::pthread_self(), signal) == 0;
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut());
        libc::sigaction(signal, &raw const former, std::ptr::null_mut());
        is_sent.then_some(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_signal_frame_of_this_machine_has_an_xsave_area_of_at_least_the_legacy_part() {
        let software = of_this_machine().unwrap();
        assert!(software.xsave_bytes().unwrap() >= 576, "{software:?}");
        assert_eq!(of_this_machine(), Some(software));
    }
}
