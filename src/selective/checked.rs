//! Checks stored sites of a build against the file: a table may be damaged, and a probe is only placed on an instruction in the allocator's
//! code that the kernel emulates.

use crate::process::elf::{Elf, ReadAt};
use crate::process::functions::Functions;
use crate::selective::scope::{Candidate, scope};
use crate::selective::store::{Entry, Place};
use crate::selective::{LargeSite, LargeSites, Unfit};

/// The sites of an entry in its file; `None` if they do not match the file.
pub(super) fn check<R: ReadAt>(elf: &Elf<R>, entry: &Entry) -> Option<Result<LargeSites, Unfit>> {
    let (allocs, frees) = match &entry.found {
        Ok(found) => found,
        Err(unfit) => return Some(Err(*unfit)),
    };
    let functions = Functions::of(elf);
    let mut entries: [Option<u64>; 3] = [None; 3];
    elf.for_each_function(|function| {
        let names: [&[u8]; 3] = [b"malloc", b"calloc", b"free"];
        if let Some(at) = names.iter().position(|name| *name == function.name && function.exported) {
            entries[at].get_or_insert(function.vaddr);
        }
    });
    let [malloc, calloc, free] = entries;
    let near = |entry: Option<u64>| entry.map(|entry| scope(elf, &functions, entry).candidates).unwrap_or_default();
    let in_alloc = [near(malloc), near(calloc)].concat();
    let in_free = near(free);
    let place = |place: &Place, scope: &[Candidate]| {
        scope.iter().any(|candidate| candidate.vaddr == place.vaddr).then_some(())?;
        Some(LargeSite { vaddr: place.vaddr, offset: elf.offset_of(place.vaddr)?.0, register: place.register, holds: place.holds })
    };
    Some(Ok(LargeSites {
        allocs: allocs.iter().map(|at| place(at, &in_alloc)).collect::<Option<_>>()?,
        frees: frees.iter().map(|at| place(at, &in_free)).collect::<Option<_>>()?,
    }))
}
