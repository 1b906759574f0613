//! Checks whether sites count requests correctly: each large block once, with its address, and nothing else.

use crate::selective::observed::{Done, Function, Passes, Visit};
use crate::selective::{LargeSite, LargeSites, Unfit};

/// Judges sites by completed requests.
///
/// # Errors
/// The first function whose sites miss a block, repeat one, or report a wrong one.
pub(super) fn judge(sites: &LargeSites, requests: &[Done]) -> Result<(), Unfit> {
    match requests.iter().find(|request| !is_right(sites, request)) {
        None => Ok(()),
        Some(request) => Err(Unfit::Refuted(request.function.name())),
    }
}

fn is_right(sites: &LargeSites, request: &Done) -> bool {
    let told = |sites: &[LargeSite]| -> Vec<(u64, bool)> {
        let tell = |visit: &Visit, site: &LargeSite| {
            let block = visit.block(site.register.0, site.holds)?;
            Some((block, visit.tells_of_live(site.register.0, site.holds)))
        };
        let at = |vaddr| sites.iter().find(|site| site.vaddr == vaddr);
        request.visits.iter().filter_map(|visit| tell(visit, at(visit.vaddr)?)).collect()
    };
    let (allocs, frees) = (told(&sites.allocs), told(&sites.frees));
    let own = match request.function {
        // Memory that the allocator frees for itself while it serves a request is not a live block.
        Function::Malloc | Function::Calloc if frees.iter().any(|&(_, live)| live) => return false,
        Function::Malloc | Function::Calloc => allocs,
        Function::Free if !allocs.is_empty() => return false,
        Function::Free => frees,
    };
    let times = match request.passes {
        Passes::Once => 1..=1,
        Passes::AtMostOnce => 0..=1,
        Passes::Never => 0..=0,
    };
    times.contains(&own.len()) && own.iter().all(|&(block, _)| block == request.block)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::register::Register;
    use crate::selective::Holds;

    const BLOCK: u64 = 0x5555_0000_1000;

    fn sites() -> LargeSites {
        let site = |vaddr, register, holds| LargeSite { vaddr, offset: vaddr, register: Register(register), holds };
        LargeSites { allocs: vec![site(1, 0, Holds::Block), site(2, 0, Holds::Block)], frees: vec![site(3, 4, Holds::Chunk)] }
    }

    /// A request and the sites that it reached, with the value of the register.
    fn request(function: Function, passes: Passes, visits: &[(u64, u64)]) -> Done {
        let visit = |&(vaddr, value): &(u64, u64)| {
            let mut registers = [0; 16];
            registers[if vaddr == 3 { 4 } else { 0 }] = value;
            Visit { vaddr, registers, live: 0 }
        };
        Done { function, block: BLOCK, passes, visits: visits.iter().map(visit).collect() }
    }

    #[test]
    fn every_miss_repetition_and_wrong_address_is_detected() {
        use Function::{Calloc, Free, Malloc};
        use Passes::{AtMostOnce, Never, Once};
        let chunk = BLOCK - 16;
        let right = [
            request(Malloc, Once, &[(1, BLOCK)]),
            request(Malloc, Once, &[(1, 0), (2, BLOCK)]),
            request(Malloc, AtMostOnce, &[]),
            request(Calloc, Once, &[(3, 0x7777), (2, BLOCK)]),
            request(Malloc, Never, &[(1, 0)]),
            request(Free, Once, &[(3, chunk)]),
            request(Free, Never, &[]),
        ];
        assert_eq!(judge(&sites(), &right), Ok(()));
        let wrong = [
            request(Malloc, Once, &[]),
            request(Malloc, Once, &[(1, BLOCK), (2, BLOCK)]),
            request(Malloc, AtMostOnce, &[(1, BLOCK + 16)]),
            request(Calloc, Never, &[(1, BLOCK)]),
            request(Free, Once, &[(3, BLOCK)]),
            request(Free, Once, &[(3, chunk), (3, chunk)]),
            request(Free, Once, &[(3, chunk), (1, BLOCK)]),
        ];
        for wrong in wrong {
            assert_eq!(judge(&sites(), std::slice::from_ref(&wrong)), Err(Unfit::Refuted(wrong.function.name())), "{wrong:?}");
        }
        let mut frees_a_live_one = request(Malloc, Once, &[(3, 0x7777), (1, BLOCK)]);
        frees_a_live_one.visits[0].note_live(|block| block == 0x7777 + 16);
        assert_eq!(judge(&sites(), &[frees_a_live_one]), Err(Unfit::Refuted("malloc")));
    }
}
