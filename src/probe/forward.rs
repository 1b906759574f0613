//! Entry points that need no probe because they always forward to another one that has a probe.
//!
//! - A function that only jumps to another with its arguments in place (`operator new[]` → `operator new`, `aligned_alloc` →
//!   `mi_aligned_alloc`). With probes on both, each call would be seen twice, the second time with the stack pointer of the first and a
//!   return address that is already replaced.
//! - A function that frees, and on every path from its site calls or jumps to another that frees (jemalloc's sized and aligned
//!   `operator delete` → `sdallocx`). Frees have no return probe by which the inner call could be recognized, so the block would be freed
//!   twice. It is assumed that such a function passes on the block that it was given.
//!
//! The other function is found by address in the same file, or by name if the path leads through the procedure linkage table.

use std::collections::BTreeSet;

use super::flow::{Flow, flow_at, stub_slot};
use super::placement::Placement;
use crate::allocator::functions::{FUNCTIONS, Op, Shape};
use crate::allocator::in_file::EntryPoint;
use crate::machine::Machine;
use crate::process::elf::{Elf, ReadAt};

/// Maximum number of bytes of a function whose paths are followed: wrappers are short.
const WRAPPER_BYTES_MAX: u64 = 512;

/// Finds the functions to which a file's entry points forward.
pub struct Forwarding<'a, R> {
    elf: &'a Elf<R>,
    entry_points: &'a [EntryPoint],
    /// Slots of the global offset table and the names bound to them.
    slots: Vec<(u64, Vec<u8>)>,
}

/// An entry point that is called or jumped to.
struct Callee {
    name: String,
    shape: Shape,
}

impl<'a, R: ReadAt> Forwarding<'a, R> {
    /// For a file with these entry points.
    #[must_use]
    pub fn new(elf: &'a Elf<R>, entry_points: &'a [EntryPoint]) -> Self {
        Self { elf, entry_points, slots: elf.linkage_slots() }
    }

    /// A sentence why `from`, whose probe would be placed at `placement`, needs none; `None` if it needs one.
    #[must_use]
    pub fn covers(&self, from: &EntryPoint, shape: Shape, placement: &Placement) -> Option<String> {
        if let Some(jump) = placement.jump {
            let callee = self.callee_at(jump.target).filter(|_| jump.target != from.vaddr)?;
            let hands_on = callee.shape.op == shape.op && jump.passes_on(callee.shape);
            return hands_on.then(|| format!("only jumps to {}, which has a probe", callee.name));
        }
        if shape.op != Op::Free {
            return None;
        }
        let callee = self.always_reached(from, from.vaddr.checked_add(placement.offset.into())?)?;
        Some(format!("always calls {callee}, which has a probe"))
    }

    /// The entry point at an address, or the one that the linkage stub there leads to.
    fn callee_at(&self, target: u64) -> Option<Callee> {
        if let Some(entry_point) = self.entry_points.iter().find(|e| e.vaddr == target) {
            return Some(Callee { name: entry_point.symbols.first()?.clone(), shape: entry_point.function.get()?.shape });
        }
        let slot = stub_slot(Machine::HOST, &self.elf.bytes_at(target, 32), target)?;
        let (_, name) = self.slots.iter().find(|(vaddr, _)| *vaddr == slot)?;
        let function = FUNCTIONS.iter().find(|f| f.symbol.as_bytes() == name.as_slice())?;
        Some(Callee { name: function.symbol.to_owned(), shape: function.shape })
    }

    /// The freeing function that every path from `site` reaches before the function returns.
    fn always_reached(&self, from: &EntryPoint, site: u64) -> Option<String> {
        let end = from.vaddr.checked_add(from.size.min(WRAPPER_BYTES_MAX))?;
        let code = self.elf.bytes_at(from.vaddr, end - from.vaddr);
        let mut reached = None;
        let mut seen = BTreeSet::new();
        let mut ways = vec![site];
        while let Some(vaddr) = ways.pop() {
            if !seen.insert(vaddr) {
                continue;
            }
            let bytes = vaddr.checked_sub(from.vaddr).and_then(|at| code.get(usize::try_from(at).ok()?..)).filter(|b| !b.is_empty())?;
            let call = match flow_at(Machine::HOST, bytes, vaddr) {
                Flow::Unknown => return None,
                Flow::Next(next) => {
                    ways.push(next);
                    continue;
                }
                Flow::Branch { next, target } => {
                    ways.extend([next, target]);
                    continue;
                }
                Flow::Jump(target) if target > from.vaddr && target < end => {
                    ways.push(target);
                    continue;
                }
                Flow::Jump(target) => (target, None),
                Flow::Call { next, target } => (target, Some(next)),
            };
            let frees = |callee: &Callee| callee.shape.op == Op::Free && call.0 != from.vaddr;
            match (self.callee_at(call.0).filter(frees), call.1) {
                (Some(callee), _) => reached = Some(callee.name),
                // A helper on the path, which returns.
                (None, Some(next)) => ways.push(next),
                (None, None) => return None,
            }
        }
        reached
    }
}
