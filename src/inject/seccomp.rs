//! Whether a seccomp filter allows a system call, whatever its arguments: the filter is run with the arguments unknown. Pure.
//!
//! Filters are classic BPF over `struct seccomp_data` (include/uapi/linux/seccomp.h, filter.h): they only jump forwards and have no memory
//! but two registers and 16 words. Where a branch depends on an unknown value, both ways are taken.

use super::machine::AUDIT_ARCH;

/// An instruction: `struct sock_filter`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Jump if true.
    pub jt: u8,
    /// Jump if false.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

/// Instructions of a filter: `BPF_MAXINSNS`.
pub const INSTRUCTIONS_MAX: usize = 4096;
/// Filters of a thread: the kernel limits their instructions to 32,768, and each counts four more.
pub const FILTERS_MAX: usize = 32_768 / 5;
/// Steps taken: a filter of a container runtime has about 500 instructions, of which few depend on arguments.
const STEPS_MAX: usize = 200_000;
/// Actions: `SECCOMP_RET_ALLOW`, `SECCOMP_RET_LOG`, and the bits that hold the action.
const ALLOW: u32 = 0x7fff_0000;
const LOG: u32 = 0x7ffc_0000;
const ACTION: u32 = 0xffff_0000;

/// What a filter does with a system call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It lets the call through for all arguments.
    Allows,
    /// It refuses, kills, traces or notifies for some arguments, or cannot be followed.
    MayForbid,
}

#[derive(Clone)]
struct State {
    at: usize,
    a: Option<u32>,
    x: Option<u32>,
    memory: [Option<u32>; 16],
}

/// Runs a filter for the system call with this number.
#[must_use]
pub fn decide(filter: &[Instruction], number: u32) -> Decision {
    let mut pending = vec![State { at: 0, a: Some(0), x: Some(0), memory: [Some(0); 16] }];
    for _ in 0..STEPS_MAX {
        let Some(mut state) = pending.pop() else { return Decision::Allows };
        let Some(instruction) = filter.get(state.at) else { return Decision::MayForbid };
        state.at += 1;
        match step(&mut state, *instruction, number) {
            Some(Next::On) => pending.push(state),
            Some(Next::Either(yes, no)) => {
                let other = State { at: state.at + no, ..state.clone() };
                state.at += yes;
                pending.extend([state, other]);
            }
            Some(Next::Ends(Some(action))) if matches!(action & ACTION, ALLOW | LOG) => {}
            _ => return Decision::MayForbid,
        }
    }
    Decision::MayForbid
}

enum Next {
    On,
    Either(usize, usize),
    Ends(Option<u32>),
}

/// One instruction; `None` for one that filters cannot have. The numbers are those of linux/bpf_common.h.
fn step(state: &mut State, Instruction { code, jt, jf, k }: Instruction, number: u32) -> Option<Next> {
    let operand = if code & 0x08 == 0 { Some(k) } else { state.x };
    match code & 7 {
        // LD and LDX: by mode.
        class @ (0 | 1) => {
            let value = match code & 0xe0 {
                0x00 => Some(k),
                0x20 if class == 0 => load(k, number),
                0x60 => *state.memory.get(k as usize)?,
                // The length of seccomp_data.
                0x80 => Some(64),
                _ => return None,
            };
            *(if class == 0 { &mut state.a } else { &mut state.x }) = value;
        }
        2 => *state.memory.get_mut(k as usize)? = state.a,
        3 => *state.memory.get_mut(k as usize)? = state.x,
        4 => state.a = arithmetic(code & 0xf0, state.a, operand)?,
        5 => {
            let (yes, no) = (usize::from(jt), usize::from(jf));
            if code & 0xf0 == 0 {
                state.at = state.at.checked_add(k as usize)?;
                return Some(Next::On);
            }
            let (Some(a), Some(b)) = (state.a, operand) else { return Some(Next::Either(yes, no)) };
            let taken = match code & 0xf0 {
                0x10 => a == b,
                0x20 => a > b,
                0x30 => a >= b,
                0x40 => a & b != 0,
                _ => return None,
            };
            state.at += if taken { yes } else { no };
        }
        6 => return Some(Next::Ends(if code & 0x18 == 0x10 { state.a } else { Some(k) })),
        // TAX and TXA.
        _ if code & 0xf8 == 0 => state.x = state.a,
        _ => state.a = state.x,
    }
    Some(Next::On)
}

/// A word of `struct seccomp_data`: number, architecture, then addresses and arguments, which are unknown.
fn load(offset: u32, number: u32) -> Option<u32> {
    match offset {
        0 => Some(number),
        4 => Some(AUDIT_ARCH),
        _ => None,
    }
}

/// `Some(None)` = an unknown value.
fn arithmetic(operation: u16, a: Option<u32>, b: Option<u32>) -> Option<Option<u32>> {
    if operation == 0x80 {
        return Some(a.map(u32::wrapping_neg));
    }
    let (Some(a), Some(b)) = (a, b) else { return Some(None) };
    Some(Some(match operation {
        0x00 => a.wrapping_add(b),
        0x10 => a.wrapping_sub(b),
        0x20 => a.wrapping_mul(b),
        0x30 => a.checked_div(b)?,
        0x40 => a | b,
        0x50 => a & b,
        0x60 => a.checked_shl(b).unwrap_or(0),
        0x70 => a.checked_shr(b).unwrap_or(0),
        0xa0 => a ^ b,
        _ => return None,
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn i(code: u16, jt: u8, jf: u8, k: u32) -> Instruction {
        Instruction { code, jt, jf, k }
    }

    const LOAD: u16 = 0x20;
    const JEQ: u16 = 0x15;
    const RET: u16 = 0x06;

    #[test]
    fn a_filter_that_lists_calls_allows_those() {
        let filter = [i(LOAD, 0, 0, 0), i(JEQ, 0, 1, 28), i(RET, 0, 0, ALLOW), i(RET, 0, 0, 0x0005_0001)];
        assert_eq!(decide(&filter, 28), Decision::Allows);
        assert_eq!(decide(&filter, 12), Decision::MayForbid);
    }

    #[test]
    fn a_filter_that_depends_on_an_argument_may_forbid() {
        // madvise only with advice 4.
        let filter = [i(LOAD, 0, 0, 0), i(JEQ, 0, 2, 28), i(LOAD, 0, 0, 32), i(JEQ, 0, 1, 4), i(RET, 0, 0, ALLOW), i(RET, 0, 0, 0)];
        assert_eq!(decide(&filter, 28), Decision::MayForbid);
        // Both ways allow.
        let filter = [i(LOAD, 0, 0, 32), i(JEQ, 0, 1, 4), i(RET, 0, 0, ALLOW), i(RET, 0, 0, LOG)];
        assert_eq!(decide(&filter, 28), Decision::Allows);
    }

    #[test]
    fn what_ends_nowhere_or_has_unknown_instructions_may_forbid() {
        for filter in [&[][..], &[i(LOAD, 0, 0, 0)], &[i(0xffff, 0, 0, 0)], &[i(5, 0, 0, u32::MAX)], &[i(2, 0, 0, 99)]] {
            assert_eq!(decide(filter, 1), Decision::MayForbid);
        }
    }

    proptest! {
        #[test]
        fn no_filter_makes_it_panic_or_run_for_ever(words: Vec<(u16, u8, u8, u32)>, number: u32) {
            let filter: Vec<Instruction> = words.into_iter().map(|(code, jt, jf, k)| i(code, jt, jf, k)).collect();
            let _ = decide(&filter, number);
        }
    }
}
