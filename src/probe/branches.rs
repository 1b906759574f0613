//! Finds the direct branches and calls in a file that lead into given windows of code.
//!
//! A probe after a function's entry must not be reachable other than through the entry. Whole libraries are searched, not only the function
//! itself, because compilers move parts of it away (`malloc.cold`) and share tails between functions:
//!
//! - Branches with a 32-bit displacement can come from anywhere. Every byte position is tried as such a branch, whether or not an
//!   instruction starts there: this needs no decoding and misses none. A false match (bytes of another instruction that look like a branch
//!   into a window of some hundred bytes within 4 GiB) only makes the probe more expensive.
//! - Branches with an 8-bit displacement come from nearby code, which is decoded, starting again at every known function.
//! - The start of a function may be called indirectly.
//!
//! arm64's branches are of four bytes, at multiples of four, so every word is tried.

use std::collections::BTreeSet;

use iced_x86::{Decoder, DecoderOptions, OpKind};

use super::flow::{Flow, flow_at};
use super::placement::WALK_BYTES_MAX;
use crate::machine::Machine;
use crate::process::elf::{Elf, ReadAt};

/// Maximum amount of code searched per file, in bytes. The largest programs (browsers) have about 200 MB; the search handles about 1 GB/s.
const CODE_BYTES_MAX: u64 = 512 << 20;
/// Bytes per read.
const CHUNK_BYTES: u64 = 1 << 20;
/// Longest branch with a 32-bit displacement: two opcode bytes and four of displacement.
const BRANCH_BYTES_MAX: u64 = 6;
/// Reach of a branch with an 8-bit displacement, including its own length.
const SHORT_REACH_BYTES: u64 = 130;
/// Maximum distance back to the start of a neighbouring function from which decoding starts.
const NEIGHBOUR_BYTES_MAX: u64 = 64 << 10;

/// The addresses in the windows that are branch targets.
#[derive(Debug, Default)]
pub struct BranchTargets {
    targets: BTreeSet<u64>,
    /// Too much code to search: every address counts as a target.
    unknown: bool,
}

impl BranchTargets {
    /// Searches a file of a machine for branches into the first [`WALK_BYTES_MAX`] bytes of the functions at `entries` (virtual addresses,
    /// ascending). `function_starts` are the addresses of all functions, ascending.
    #[must_use]
    pub fn search<R: ReadAt>(elf: &Elf<R>, machine: Machine, entries: &[u64], function_starts: &[u64]) -> Self {
        let windows = Windows::new(entries);
        let code_bytes = elf.segments().iter().filter(|s| s.executable).map(|s| s.file_bytes).fold(0, u64::saturating_add);
        let mut targets: BTreeSet<u64> = function_starts.iter().copied().filter(|&start| windows.contains(start)).collect();
        if code_bytes > CODE_BYTES_MAX {
            return Self { targets, unknown: true };
        }
        for segment in elf.segments().iter().filter(|s| s.executable) {
            let mut at = 0;
            while at < segment.file_bytes {
                let chunk = elf.bytes_at(segment.vaddr.wrapping_add(at), CHUNK_BYTES + BRANCH_BYTES_MAX);
                match machine {
                    Machine::X86_64 => far_targets(&chunk, segment.vaddr.wrapping_add(at), &windows, &mut targets),
                    Machine::Aarch64 => arm64_targets(&chunk, segment.vaddr.wrapping_add(at), &windows, &mut targets),
                }
                at += CHUNK_BYTES;
            }
        }
        for &entry in entries.iter().filter(|_| machine == Machine::X86_64) {
            near_targets(elf, entry, function_starts, &windows, &mut targets);
        }
        Self { targets, unknown: false }
    }

    /// Whether `vaddr` is a branch target.
    #[must_use]
    pub fn contains(&self, vaddr: u64) -> bool {
        self.unknown || self.targets.contains(&vaddr)
    }
}

/// The code in which targets matter.
struct Windows<'a> {
    entries: &'a [u64],
    first: u64,
    last: u64,
}

impl<'a> Windows<'a> {
    fn new(entries: &'a [u64]) -> Self {
        let first = entries.first().copied().unwrap_or(u64::MAX);
        let last = entries.last().copied().unwrap_or(0).saturating_add(WALK_BYTES_MAX);
        Self { entries, first, last }
    }

    fn contains(&self, vaddr: u64) -> bool {
        // Most targets lie outside all windows, so this is checked first.
        if vaddr <= self.first || vaddr > self.last {
            return false;
        }
        let after = self.entries.partition_point(|&entry| entry < vaddr);
        after.checked_sub(1).and_then(|i| self.entries.get(i)).is_some_and(|&entry| vaddr - entry <= WALK_BYTES_MAX)
    }
}

fn far_targets(code: &[u8], vaddr: u64, windows: &Windows<'_>, targets: &mut BTreeSet<u64>) {
    let mut note = |distance_at: usize| {
        let Some(distance) = code.get(distance_at..distance_at + 4).and_then(|b| b.try_into().ok()).map(i32::from_le_bytes) else {
            return;
        };
        let target = vaddr.wrapping_add(distance_at as u64 + 4).wrapping_add_signed(i64::from(distance));
        if windows.contains(target) {
            targets.insert(target);
        }
    };
    for (at, &byte) in code.iter().enumerate() {
        match byte {
            // call, jmp
            0xe8 | 0xe9 => note(at + 1),
            // The second byte of jcc: 0f 80–8f.
            0x80..=0x8f if at > 0 && code.get(at - 1) == Some(&0x0f) => note(at + 1),
            _ => {}
        }
    }
}

fn arm64_targets(code: &[u8], vaddr: u64, windows: &Windows<'_>, targets: &mut BTreeSet<u64>) {
    let skipped = vaddr.wrapping_neg() & 3;
    let words = code.get(skipped as usize..).unwrap_or_default().chunks_exact(4);
    for (at, word) in (vaddr.wrapping_add(skipped)..).step_by(4).zip(words) {
        let (Flow::Branch { target, .. } | Flow::Jump(target) | Flow::Call { target, .. }) = flow_at(Machine::Aarch64, word, at) else {
            continue;
        };
        if windows.contains(target) {
            targets.insert(target);
        }
    }
}

fn near_targets<R: ReadAt>(elf: &Elf<R>, entry: u64, function_starts: &[u64], windows: &Windows<'_>, targets: &mut BTreeSet<u64>) {
    let first_behind = function_starts.partition_point(|&start| start <= entry);
    let earliest = entry.saturating_sub(SHORT_REACH_BYTES);
    // The last function that starts at or before the earliest address in reach.
    let before = function_starts.partition_point(|&start| start <= earliest).checked_sub(1).and_then(|i| function_starts.get(i));
    let start = before.copied().filter(|&start| entry - start <= NEIGHBOUR_BYTES_MAX).unwrap_or(entry);
    let end = entry.saturating_add(WALK_BYTES_MAX + SHORT_REACH_BYTES);
    let inner = function_starts.get(function_starts.partition_point(|&s| s <= start)..first_behind).unwrap_or_default();
    let behind = function_starts.get(first_behind..).unwrap_or_default().iter().take_while(|&&s| s < end);
    let mut from = start;
    for &to in inner.iter().chain(behind).chain([&end]) {
        let code = elf.bytes_at(from, to - from);
        for instruction in &mut Decoder::with_ip(64, &code, from, DecoderOptions::NONE) {
            if instruction.op0_kind() == OpKind::NearBranch64 && windows.contains(instruction.near_branch_target()) {
                targets.insert(instruction.near_branch_target());
            }
        }
        from = to;
    }
}
