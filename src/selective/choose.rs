//! Chooses the smallest set of instructions such that each large block reaches exactly one of them once, with its address in a known
//! register.
//!
//! Every candidate, with every register, covers the requests in which it is reached once with the right address. It is rejected if it is
//! reached twice in one request, has a wrong address, or is reached by a cached block or by a request of another function. The rest is an
//! exact cover problem: each large request by one site, each small one by at most one. Sites in the function itself are preferred to those
//! in functions that it calls.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use crate::machine::register::Register;
use crate::selective::observed::{Done, Function, Passes, Visit};
use crate::selective::scope::Candidate;
use crate::selective::{Holds, LargeSite, Unfit};

/// Maximum number of sites per function. The known builds have at most three.
const SITES_MAX: usize = 6;
/// Maximum number of proposals examined in one search. With some dozen distinct covers it ends after some thousand.
const LOOKS_MAX: u32 = 2_000_000;
/// The stack pointer never holds a block's address.
const STACK_POINTER: u8 = 7;

/// A candidate with a register, and the requests that it covers.
struct Proposal {
    candidate: Candidate,
    register: u8,
    holds: Holds,
    /// Its position in the first request that it covers.
    order: usize,
    covers: Requests,
}

/// The visits of one instruction, with their positions among all visits of their request, by the request's number.
type ByRequest<'a> = BTreeMap<usize, Vec<(usize, &'a Visit)>>;

/// A set of requests by number.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
struct Requests(Vec<u64>);

impl Requests {
    fn add(&mut self, number: usize) {
        if self.0.len() <= number / 64 {
            self.0.resize(number / 64 + 1, 0);
        }
        if let Some(word) = self.0.get_mut(number / 64) {
            *word |= 1 << (number % 64);
        }
    }

    fn has(&self, number: usize) -> bool {
        self.0.get(number / 64).is_some_and(|word| word >> (number % 64) & 1 == 1)
    }

    fn is_disjoint(&self, other: &Self) -> bool {
        self.0.iter().zip(&other.0).all(|(a, b)| a & b == 0)
    }

    fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    fn with(&self, other: &Self) -> Self {
        let words = self.0.len().max(other.0.len());
        let word = |set: &Self, n: usize| set.0.get(n).copied().unwrap_or(0);
        Self((0..words).map(|n| word(self, n) | word(other, n)).collect())
    }
}

/// Chooses the sites of a function among its candidates, using requests of all functions. The sites' file offsets are left 0.
///
/// # Errors
/// If there is no such set.
pub(super) fn choose(function: Function, candidates: &[Candidate], requests: &[Done]) -> Result<Vec<LargeSite>, Unfit> {
    let required: Vec<usize> =
        (0..requests.len()).filter(|&n| requests.get(n).is_some_and(|r| r.function == function && r.passes == Passes::Once)).collect();
    if required.is_empty() {
        return Err(Unfit::NotTried("serve a large block"));
    }
    let proposals = best_first(function, distinct(proposals(function, candidates, requests)), &required);
    for depth in [0, 1] {
        let allowed: Vec<&Proposal> = proposals.iter().filter(|proposal| proposal.candidate.depth <= depth).collect();
        for sites in 1..=SITES_MAX {
            let mut search = Search { proposals: &allowed, required: &required, chosen: Vec::new(), looks_left: LOOKS_MAX };
            if search.cover(&Requests::default(), sites) {
                return Ok(search.chosen.into_iter().map(site_of).collect());
            }
        }
    }
    Err(Unfit::NoCover(function.name()))
}

fn site_of(proposal: &Proposal) -> LargeSite {
    LargeSite { vaddr: proposal.candidate.vaddr, offset: 0, register: Register(proposal.register), holds: proposal.holds }
}

/// Candidates with registers that cover at least one request and contradict none.
fn proposals(function: Function, candidates: &[Candidate], requests: &[Done]) -> Vec<Proposal> {
    // The visits of each candidate, by request.
    let mut visits: HashMap<u64, ByRequest<'_>> = HashMap::new();
    for (number, request) in requests.iter().enumerate() {
        for (order, visit) in request.visits.iter().enumerate() {
            visits.entry(visit.vaddr).or_default().entry(number).or_default().push((order, visit));
        }
    }
    // An allocated block is reported by its own address; for a freed block often only the chunk address is in a register.
    let forms: &[Holds] = if function == Function::Free { &[Holds::Block, Holds::Chunk] } else { &[Holds::Block] };
    let mut proposals = Vec::new();
    for candidate in candidates {
        let Some(by_request) = visits.get(&candidate.vaddr) else { continue };
        for &holds in forms {
            for register in (0..16).filter(|&register| register != STACK_POINTER) {
                if let Some((covers, order)) = covers(function, by_request, requests, register, holds) {
                    proposals.push(Proposal { candidate: *candidate, register, holds, order, covers });
                }
            }
        }
    }
    proposals
}

/// The requests that an instruction covers with a register; `None` if it contradicts one, or covers none.
fn covers(function: Function, by_request: &ByRequest<'_>, requests: &[Done], register: u8, holds: Holds) -> Option<(Requests, usize)> {
    let mut covered = Requests::default();
    let mut first = None;
    for (&number, visits) in by_request {
        let request = requests.get(number)?;
        let mut told = visits.iter().filter_map(|&(order, visit)| Some((order, visit, visit.block(register, holds)?)));
        if request.function != function {
            // Memory that the allocator frees for itself is not a live block; anything else would be counted twice, or attributed to the
            // wrong block.
            let harmless = function == Function::Free && told.all(|(_, visit, _)| !visit.tells_of_live(register, holds));
            if !harmless && visits.iter().any(|(_, visit)| visit.block(register, holds).is_some()) {
                return None;
            }
            continue;
        }
        match (told.next(), told.next()) {
            (None, _) => {}
            (Some((order, _, block)), None) if block == request.block && request.passes != Passes::Never => {
                covered.add(number);
                first.get_or_insert(order);
            }
            _ => return None,
        }
    }
    Some((covered, first?))
}

/// The best of all proposals that cover the same requests: near the function, and as early as possible. Every branch on the path is another
/// way to miss it, and a free must be reported before the block can be allocated again.
fn distinct(proposals: Vec<Proposal>) -> Vec<Proposal> {
    let badness = |proposal: &Proposal| (proposal.candidate.depth, proposal.order, proposal.register, proposal.candidate.vaddr);
    let mut best: BTreeMap<Requests, Proposal> = BTreeMap::new();
    for proposal in proposals {
        match best.get(&proposal.covers) {
            Some(there) if badness(there) <= badness(&proposal) => {}
            _ => drop(best.insert(proposal.covers.clone(), proposal)),
        }
    }
    best.into_values().collect()
}

/// Sorts proposals in the order in which they are tried: near ones first, then those that cover the most large requests. After that, for
/// allocations those that cover the most small requests, because whether and how a new block is cleared depends on its size, so such a path
/// may not be that of every large block; for frees those that cover the fewest, because small requests add cost without benefit.
fn best_first(function: Function, mut proposals: Vec<Proposal>, required: &[usize]) -> Vec<Proposal> {
    proposals.sort_by_cached_key(|proposal| {
        let large = required.iter().filter(|&&number| proposal.covers.has(number)).count();
        let all = i64::from(proposal.covers.count());
        let small = if function == Function::Free { all } else { -all };
        (proposal.candidate.depth, Reverse(large), small, proposal.order, proposal.candidate.vaddr)
    });
    proposals
}

/// A search for an exact cover.
struct Search<'a> {
    proposals: &'a [&'a Proposal],
    required: &'a [usize],
    chosen: Vec<&'a Proposal>,
    looks_left: u32,
}

impl Search<'_> {
    /// Whether the required requests that are not yet covered can be covered by at most this many more sites.
    fn cover(&mut self, covered: &Requests, sites_left: usize) -> bool {
        let Some(&next) = self.required.iter().find(|&&number| !covered.has(number)) else { return true };
        if sites_left == 0 {
            return false;
        }
        for proposal in self.proposals {
            let Some(left) = self.looks_left.checked_sub(1) else { return false };
            self.looks_left = left;
            if !proposal.covers.has(next) || !proposal.covers.is_disjoint(covered) {
                continue;
            }
            self.chosen.push(proposal);
            if self.cover(&covered.with(&proposal.covers), sites_left - 1) {
                return true;
            }
            self.chosen.pop();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const BLOCK: u64 = 0x5555_0000_1000;

    /// A request of malloc with visits: address, and the values of rax and rcx there.
    fn malloc(passes: Passes, visits: &[(u64, u64, u64)]) -> Done {
        let visit = |&(vaddr, rax, rcx): &(u64, u64, u64)| {
            let mut registers = [0; 16];
            (registers[0], registers[2]) = (rax, rcx);
            Visit { vaddr, registers, live: 0 }
        };
        Done { function: Function::Malloc, block: BLOCK, passes, visits: visits.iter().map(visit).collect() }
    }

    fn candidates(at: &[(u64, u8)]) -> Vec<Candidate> {
        at.iter().map(|&(vaddr, depth)| Candidate { vaddr, depth }).collect()
    }

    fn chosen(candidates: &[Candidate], requests: &[Done]) -> Result<Vec<(u64, u8)>, Unfit> {
        Ok(choose(Function::Malloc, candidates, requests)?.iter().map(|site| (site.vaddr, site.register.0)).collect())
    }

    #[test]
    fn paths_that_fork_and_join_are_covered_once_each() {
        // At 1, rax is stale on the second path; 2 and 3 are each on one path; 4 follows both, but a cached block reaches it too.
        let requests = [
            malloc(Passes::Once, &[(1, BLOCK, 7), (2, BLOCK, 7), (4, BLOCK, 7)]),
            malloc(Passes::Once, &[(1, 9, 7), (3, 9, BLOCK), (4, BLOCK, 7)]),
            malloc(Passes::Never, &[(4, BLOCK, 7)]),
        ];
        let candidates = candidates(&[(1, 0), (2, 0), (3, 0), (4, 0)]);
        assert_eq!(chosen(&candidates, &requests), Ok(vec![(2, 0), (3, 2)]));
    }

    #[test]
    fn one_site_is_better_than_two_and_a_near_one_better_than_one_in_a_callee() {
        let requests = [
            malloc(Passes::Once, &[(10, BLOCK, 0), (11, BLOCK, 0), (13, BLOCK, 0)]),
            malloc(Passes::Once, &[(10, BLOCK, 0), (12, BLOCK, 0), (13, BLOCK, 0)]),
        ];
        let all = candidates(&[(10, 1), (11, 0), (12, 0), (13, 0)]);
        assert_eq!(chosen(&all, &requests), Ok(vec![(13, 0)]));
        assert_eq!(chosen(&all[..3], &requests), Ok(vec![(11, 0), (12, 0)]));
        assert_eq!(chosen(&all[..1], &requests), Ok(vec![(10, 0)]));
    }

    #[test]
    fn instructions_reached_twice_or_by_another_function_or_by_a_failure_are_no_sites() {
        let once = malloc(Passes::Once, &[(1, BLOCK, 0)]);
        let candidates = candidates(&[(1, 0)]);
        assert_eq!(chosen(&candidates, std::slice::from_ref(&once)), Ok(vec![(1, 0)]));
        let twice = malloc(Passes::AtMostOnce, &[(1, BLOCK, 0), (1, BLOCK, 0)]);
        assert_eq!(chosen(&candidates, &[once.clone(), twice]), Err(Unfit::NoCover("malloc")));
        let freed = Done { function: Function::Free, ..once.clone() };
        assert_eq!(chosen(&candidates, &[once.clone(), freed]), Err(Unfit::NoCover("malloc")));
        let failed = |rax| Done { block: 0, ..malloc(Passes::Never, &[(1, rax, 0)]) };
        assert_eq!(chosen(&candidates, &[once.clone(), failed(0)]), Ok(vec![(1, 0)]));
        assert_eq!(chosen(&candidates, &[once, failed(BLOCK)]), Err(Unfit::NoCover("malloc")));
        assert!(matches!(chosen(&candidates, &[]), Err(Unfit::NotTried(_))));
    }
}
