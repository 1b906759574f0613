//! Where in a process the function is that releases an allocator's pages.

use crate::allocator::detect::{AllocatorModule, Detection};
use crate::allocator::{Allocator, Release, ReleaseCall};
use crate::inject::{self, Forbidden, Refusal, locks};
use crate::process::Process;
use crate::process::maps::Maps;
use crate::trim::TrimRefusal;

/// A call that can be made in a process.
#[derive(Debug, Clone)]
pub struct Callable {
    /// The call.
    pub call: &'static ReleaseCall,
    /// Address of its function.
    pub function: u64,
    /// The file that has it, for display.
    pub file: String,
    /// Code in which the calling thread must not be.
    pub forbidden: Vec<Forbidden>,
}

/// Finds the call that releases the pages of an allocator's heap.
///
/// # Errors
/// If there is none, or it is not known which one, or something unknown stands in front of it.
pub fn callable(process: &Process, maps: &Maps, detection: &Detection, allocator: Allocator) -> Result<Callable, TrimRefusal> {
    let row = allocator.row();
    let calls = match row.release {
        Release::Calls(calls) => calls,
        Release::NoCall(reason) => return Err(TrimRefusal::NoCall { allocator: row.name, reason }),
    };
    let front = detection.modules.iter().find(|module| module.serves_malloc && module.found.allocator == Allocator::Other);
    if let Some(front) = front {
        return Err(TrimRefusal::AllocatorInFront { library: front.file_name(), allocator: row.name });
    }
    let module = module_of(detection, allocator)?;
    let names = |call: &ReleaseCall| match (call.is_prefixed, module.found.prefix.as_str()) {
        (false, _) | (true, "") => vec![call.symbol.to_owned()],
        // Where the allocator has the C names it has its own without a prefix, too.
        (true, prefix) => vec![format!("{prefix}{}", call.symbol), call.symbol.to_owned()],
    };
    let found = calls.iter().find_map(|call| {
        let names = names(call);
        let vaddr = names.iter().find_map(|name| inject::function_vaddr(&module.file, name.as_bytes()))?;
        Some((call, inject::address_of(maps, &module.mapping, &module.file, vaddr)?))
    });
    let missing = || Refusal::FunctionMissing { function: calls.first().map(|call| call.symbol.to_owned()).unwrap_or_default() };
    let (call, function) = found.ok_or_else(missing)?;
    let mut forbidden = locks::of_allocator(maps, module, allocator);
    forbidden.extend(locks::of_fork(process, maps));
    Ok(Callable { call, function, file: module.file_name(), forbidden })
}

/// The file with the allocator: the one that serves malloc, or the only one.
fn module_of(detection: &Detection, allocator: Allocator) -> Result<&AllocatorModule, TrimRefusal> {
    let own: Vec<&AllocatorModule> =
        detection.modules.iter().filter(|module| module.found.functions.iter().any(|function| function.allocator == allocator)).collect();
    match own.as_slice() {
        [] => Err(Refusal::FunctionMissing {
            function: match allocator.row().release {
                Release::Calls([first, ..]) => first.symbol.to_owned(),
                _ => "malloc".to_owned(),
            },
        }
        .into()),
        [only] => Ok(only),
        several => several
            .iter()
            .find(|module| module.serves_malloc && module.found.allocator == allocator)
            .copied()
            .ok_or(TrimRefusal::SeveralCopies { allocator: allocator.name(), copies: several.len() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_allocator_either_has_a_call_or_says_why_not() {
        for allocator in Allocator::known() {
            match allocator.row().release {
                Release::Calls(calls) => assert!(!calls.is_empty(), "{}", allocator.name()),
                Release::NoCall(reason) => assert!(!reason.is_empty(), "{}", allocator.name()),
            }
        }
    }
}
