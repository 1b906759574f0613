//! The part of a file's code that is searched for a function's sites.

use std::ops::Range;

use iced_x86::{Decoder, DecoderOptions, FlowControl, Instruction, MemorySize, Mnemonic, OpKind};

use crate::probe::placement::{Emulation, is_emulated};
use crate::process::elf::{Elf, ReadAt};
use crate::process::functions::Functions;

/// Maximum number of parts in one function's scope. malloc has two or three.
const PARTS_MAX: usize = 64;
/// Maximum number of candidates of one function, and of locks: the largest known has about 400.
const CANDIDATES_MAX: usize = 4096;

/// An instruction that can be a site: the kernel's uprobes emulate it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    /// Virtual address in the file.
    pub vaddr: u64,
    /// 0 in the function itself and in functions that it jumps to, 1 in functions that these call.
    pub depth: u8,
}

/// The code that is searched for a function's sites.
#[derive(Debug, Clone, Default)]
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // nothing is run elsewhere
pub(super) struct Scope {
    /// By address.
    pub candidates: Vec<Candidate>,
    /// Instructions that acquire a lock.
    pub locks: Vec<u64>,
}

/// The scope of the function at `entry`: the function, those that it tail-calls, and those that any of these calls. Functions called
/// further down serve several purposes (locks, list operations), so reaching them is not conclusive.
pub(super) fn scope<R: ReadAt>(elf: &Elf<R>, functions: &Functions, entry: u64) -> Scope {
    let Scope { mut candidates, mut locks } = Scope::default();
    let mut parts: Vec<(Range<u64>, u8)> = functions.around(entry).map(|range| (range, 0)).into_iter().collect();
    let mut next = 0;
    while let Some((range, depth)) = parts.get(next).cloned() {
        next += 1;
        let code = elf.bytes_at(range.start, range.end - range.start);
        for instruction in &mut Decoder::with_ip(64, &code, range.start, DecoderOptions::NONE) {
            if instruction.is_invalid() {
                break;
            }
            let at = usize::try_from(instruction.ip() - range.start).unwrap_or(usize::MAX);
            let bytes = code.get(at..).and_then(|rest| rest.get(..instruction.len())).unwrap_or_default();
            // Instructions that every kernel emulates: sites found here are also used on other kernels.
            if is_emulated(&instruction, bytes, Emulation::default()) && candidates.len() < CANDIDATES_MAX {
                candidates.push(Candidate { vaddr: instruction.ip(), depth });
            }
            if takes_lock(&instruction) && locks.len() < CANDIDATES_MAX {
                locks.push(instruction.ip());
            }
            let to = (instruction.op0_kind() == OpKind::NearBranch64).then(|| instruction.near_branch_target());
            let Some(to) = to.filter(|to| !range.contains(to)) else { continue };
            let to_depth = depth + u8::from(instruction.flow_control() == FlowControl::Call);
            // Only a jump from the function itself is a tail call; a tail call of a callee is one more call level.
            let in_scope = to_depth == 0 || (depth == 0 && to_depth == 1);
            let known = parts.iter().position(|(part, _)| part.contains(&to));
            match (known, functions.around(to)) {
                (None, Some(part)) if in_scope && parts.len() < PARTS_MAX => parts.push((part, to_depth)),
                _ => {}
            }
        }
    }
    candidates.sort_unstable_by_key(|candidate| (candidate.vaddr, candidate.depth));
    candidates.dedup_by_key(|candidate| candidate.vaddr);
    Scope { candidates, locks }
}

/// Whether an instruction acquires a lock: glibc's locks are 32-bit words, acquired by compare-and-exchange.
fn takes_lock(instruction: &Instruction) -> bool {
    instruction.has_lock_prefix() && instruction.mnemonic() == Mnemonic::Cmpxchg && instruction.memory_size() == MemorySize::UInt32
}
