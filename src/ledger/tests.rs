//! The ledger against a model that keeps everything in ordinary maps and recomputes what it is asked.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;

use super::*;

/// Times of the tests are multiples of this, so that their ticks differ.
const STEP_NS: u64 = 1024;

#[derive(Debug, Clone)]
enum Op {
    Alloc { addr: u64, size: u64, stack: u64, tid: u32 },
    Free { addr: u64, stack: u64 },
    ReallocFree { addr: u64, tid: u32 },
    ReallocFail { tid: u32 },
    Unmap { start: u64, len: u64 },
    LostFree,
    LostAlloc,
    Gap,
    Fork,
    Prune { modulus: u64 },
}

#[derive(Debug, Clone, PartialEq)]
struct ModelBlock {
    size: u64,
    stack: u64,
    birth: u64,
    doubtful: bool,
}

#[derive(Debug, Clone, Default, PartialEq)]
struct Account {
    allocations: u64,
    allocated: u64,
    frees: u64,
    freed: u64,
    corrections: u64,
    corrected: u64,
    inherited: u64,
    inherited_bytes: u64,
    freed_here: u64,
}

#[derive(Clone, Default)]
struct Model {
    blocks: BTreeMap<u64, ModelBlock>,
    accounts: HashMap<u64, Account>,
    reallocs: HashMap<u32, (u64, Option<(ModelBlock, u64)>)>,
    lifetimes_us: Vec<u64>,
    unknown_frees: u64,
    /// The block that the only freeing thread freed last.
    latest_free: Option<u64>,
    peak: u64,
    at_peak: HashMap<u64, (u64, u64)>,
    loss_until: Option<u64>,
}

impl Model {
    fn account(&mut self, stack: u64) -> &mut Account {
        self.accounts.entry(stack).or_default()
    }

    fn live_by_stack(&self) -> HashMap<u64, (u64, u64)> {
        let mut by_stack = HashMap::new();
        for block in self.blocks.values() {
            let entry: &mut (u64, u64) = by_stack.entry(block.stack).or_default();
            entry.0 += 1;
            entry.1 += block.size;
        }
        by_stack
    }

    fn note_peak(&mut self) {
        let live = self.blocks.values().map(|block| block.size).sum();
        if live > self.peak {
            self.peak = live;
            self.at_peak = self.live_by_stack();
        }
    }

    fn correct(&mut self, addr: u64) {
        let block = self.blocks.remove(&addr).unwrap();
        let account = self.account(block.stack);
        account.corrections += 1;
        account.corrected += block.size;
    }

    fn free(&mut self, addr: u64, now: u64) -> Option<ModelBlock> {
        let Some(block) = self.blocks.remove(&addr) else {
            self.unknown_frees += 1;
            return None;
        };
        let account = self.account(block.stack);
        account.frees += 1;
        account.freed += block.size;
        self.lifetimes_us.push((now - block.birth) / 1000);
        Some(block)
    }

    fn doubt_all(&mut self, now: u64) {
        self.loss_until = Some(now);
        self.blocks.values_mut().for_each(|block| block.doubtful = true);
    }

    fn fork(&self) -> Self {
        let mut child = Self { blocks: self.blocks.clone(), loss_until: self.loss_until, ..Self::default() };
        for (stack, (count, bytes)) in child.live_by_stack() {
            *child.account(stack) = Account { inherited: count, inherited_bytes: bytes, ..Account::default() };
        }
        // Its first state is its highest so far, also if all blocks are empty.
        (child.peak, child.at_peak) = (child.blocks.values().map(|block| block.size).sum(), child.live_by_stack());
        child
    }
}

/// One process: the ledger and its model, with the same events.
#[derive(Clone)]
struct Pair {
    ledger: Ledger,
    model: Model,
}

impl Pair {
    fn new() -> Self {
        Self { ledger: Ledger::new(0, StackLimits::default()), model: Model::default() }
    }

    fn apply(&mut self, op: &Op, now: u64) -> Option<Self> {
        let (ledger, model) = (&mut self.ledger, &mut self.model);
        match *op {
            Op::Alloc { addr, size, stack, tid } => {
                ledger.apply(&Event::Alloc {
                    addr: Addr(addr),
                    size_bytes: size,
                    stack: StackHash(stack),
                    tid,
                    how: Default::default(),
                    time_ns: now,
                });
                model.reallocs.remove(&tid);
                if model.blocks.contains_key(&addr) {
                    model.correct(addr);
                }
                let account = model.account(stack);
                account.allocations += 1;
                account.allocated += size;
                model.blocks.insert(addr, ModelBlock { size, stack, birth: now, doubtful: false });
                model.note_peak();
            }
            Op::Free { addr, stack } => {
                // A thread that never reallocates: the free that a realloc makes of its own old block has a test of its own.
                ledger.apply(&Event::Free { addr: Addr(addr), stack: StackHash(stack), tid: u32::MAX, time_ns: now });
                if model.blocks.contains_key(&addr) {
                    model.latest_free = Some(addr);
                } else if model.latest_free == Some(addr) {
                    return None;
                }
                if model.free(addr, now).is_some() && stack != 0 {
                    model.account(stack).freed_here += 1;
                }
            }
            Op::ReallocFree { addr, tid } => {
                ledger.apply(&Event::ReallocFree { addr: Addr(addr), stack: StackHash(0), tid, time_ns: now });
                let freed = model.free(addr, now).map(|block| {
                    let lifetime_us = (now - block.birth) / 1000;
                    (block, lifetime_us)
                });
                model.reallocs.insert(tid, (addr, freed));
            }
            Op::ReallocFail { tid } => {
                let (addr, freed) = model.reallocs.remove(&tid)?;
                ledger.apply(&Event::ReallocFail { addr: Addr(addr), tid });
                if let Some((block, lifetime_us)) = freed.filter(|_| !model.blocks.contains_key(&addr)) {
                    let account = model.account(block.stack);
                    account.frees -= 1;
                    account.freed -= block.size;
                    let doubtful = model.loss_until.is_some_and(|until| block.birth <= until);
                    let index = model.lifetimes_us.iter().position(|&known| known == lifetime_us).unwrap();
                    model.lifetimes_us.swap_remove(index);
                    model.blocks.insert(addr, ModelBlock { doubtful, ..block });
                    model.note_peak();
                }
            }
            Op::Unmap { start, len } => {
                ledger.apply(&Event::Unmapped { start: Addr(start), end: Addr(start + len), time_ns: now });
                let gone: Vec<u64> = model.blocks.range(start..start + len).map(|(&addr, _)| addr).collect();
                gone.into_iter().for_each(|addr| model.correct(addr));
                // Deferred work must have the same result as if done at once, so the ledger settles only now and then.
                ledger.settle();
            }
            Op::LostFree => {
                // The block is freed, but the ledger does not learn of it: it must keep it, as doubtful.
                ledger.apply(&Event::Loss { alloc: 0, free: 1, other: 0, time_ns: now });
                model.doubt_all(now);
            }
            Op::LostAlloc => ledger.apply(&Event::Loss { alloc: 1, free: 0, other: 0, time_ns: now }),
            Op::Gap => {
                ledger.apply(&Event::Gap { start_ns: now, end_ns: now });
                model.doubt_all(now);
            }
            Op::Fork => return Some(Self { ledger: ledger.fork(), model: model.fork() }),
            Op::Prune { modulus } => {
                ledger.prune(|block| block.addr.0 / 16 % modulus != 0);
                let gone: Vec<u64> = model.blocks.keys().copied().filter(|addr| addr / 16 % modulus == 0).collect();
                gone.into_iter().for_each(|addr| model.correct(addr));
            }
        }
        None
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let (ledger, model) = (&self.ledger, &self.model);
        let shown: Vec<(u64, u64)> = ledger.sorted_blocks(|_| true).iter().map(|block| (block.addr.0, block.size_bytes)).collect();
        let truth: Vec<(u64, u64)> = model.blocks.iter().map(|(&addr, block)| (addr, block.size)).collect();
        prop_assert_eq!(shown, truth);
        prop_assert_eq!(ledger.totals().live_bytes, model.blocks.values().map(|block| block.size).sum::<u64>());
        prop_assert_eq!(ledger.totals().peak_bytes, model.peak);
        prop_assert_eq!(ledger.stats().unknown_frees, model.unknown_frees);
        let mut lifetimes = [0; BUCKETS];
        for &lifetime_us in &model.lifetimes_us {
            lifetimes[(0..63).find(|&bit| lifetime_us < 1 << bit).unwrap()] += 1;
        }
        prop_assert_eq!(ledger.histograms().lifetimes.counts(), &lifetimes);
        let of_stacks: u64 = ledger.stacks().map(|view| ledger.stack_histograms(view.id).unwrap().lifetimes.total()).sum();
        prop_assert_eq!(of_stacks, model.lifetimes_us.len() as u64);
        let live = model.live_by_stack();
        for view in ledger.stacks() {
            if view.id == STACKS_BEYOND_LIMIT {
                prop_assert_eq!(view.totals, StackTotals::default());
                continue;
            }
            let hash = view.hash.0;
            let account = model.accounts.get(&hash).cloned().unwrap_or_default();
            let totals = view.totals;
            let shown = Account {
                allocations: totals.allocations,
                allocated: totals.allocated_bytes,
                frees: totals.frees,
                freed: totals.freed_bytes,
                corrections: totals.corrections,
                corrected: totals.correction_bytes,
                inherited: totals.inherited,
                inherited_bytes: totals.inherited_bytes,
                freed_here: totals.freed_here,
            };
            prop_assert_eq!(shown, account, "stack {}", hash);
            prop_assert_eq!((totals.live, totals.live_bytes), live.get(&hash).copied().unwrap_or_default());
            prop_assert_eq!((totals.at_peak, totals.at_peak_bytes), model.at_peak.get(&hash).copied().unwrap_or_default());
            let doubtful: Vec<&ModelBlock> = model.blocks.values().filter(|block| block.doubtful && block.stack == hash).collect();
            prop_assert_eq!(totals.doubtful, doubtful.len() as u64);
            prop_assert_eq!(totals.doubtful_bytes, doubtful.iter().map(|block| block.size).sum::<u64>());
        }
        for block in ledger.outstanding().iter() {
            let truth = &model.blocks[&block.addr.0];
            prop_assert_eq!(ledger.birth_ns(&block), truth.birth);
            prop_assert_eq!(ledger.is_doubtful(&block), truth.doubtful);
        }
        Ok(())
    }
}

/// Few addresses, so that they are used again and again; some that do not fit a slot.
fn any_addr() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => (1..40_u64).prop_map(|n| 0x5555_0000_0000 + n * 16),
        1 => (1..4_u64).prop_map(|n| 0x5555_0000_0000 + n * 16 + 3),
        1 => (1..4_u64).prop_map(|n| (1 << 50) + n * 16),
    ]
}

fn any_size() -> impl Strategy<Value = u64> {
    prop_oneof![6 => 0..200_u64, 1 => 0..1_u64 << 25, 1 => (1_u64 << 24) - 1..(1 << 24) + 2, 1 => Just(5_u64 << 32)]
}

fn any_op() -> impl Strategy<Value = Op> {
    let tid = 1..4_u32;
    prop_oneof![
        30 => (any_addr(), any_size(), 0..6_u64, tid.clone()).prop_map(|(addr, size, stack, tid)| Op::Alloc { addr, size, stack, tid }),
        20 => (any_addr(), 0..3_u64).prop_map(|(addr, stack)| Op::Free { addr, stack }),
        4 => (any_addr(), tid.clone()).prop_map(|(addr, tid)| Op::ReallocFree { addr, tid }),
        3 => tid.prop_map(|tid| Op::ReallocFail { tid }),
        1 => (any_addr(), 1..300_u64).prop_map(|(start, len)| Op::Unmap { start, len }),
        1 => Just(Op::LostFree),
        1 => Just(Op::LostAlloc),
        1 => Just(Op::Gap),
        1 => Just(Op::Fork),
        1 => (2..9_u64).prop_map(|modulus| Op::Prune { modulus }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn the_ledgers_of_interleaved_processes_agree_with_a_naive_model(
        ops in prop::collection::vec((0..3_usize, any_op()), 1..250)
    ) {
        let mut processes = vec![Pair::new()];
        for (step, (process, op)) in ops.iter().enumerate() {
            let now = (step as u64 + 1) * STEP_NS;
            let index = process % processes.len();
            if let Some(child) = processes[index].apply(op, now) {
                // A fourth child replaces the first process, as with a reused pid.
                if processes.len() < 3 { processes.push(child) } else { processes[0] = child }
            }
            if step % 16 == 0 {
                processes[index].check()?;
            }
        }
        for process in &processes {
            process.check()?;
        }
    }
}

/// The fate of a record in the kernel's ring.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fate {
    Arrived,
    Lost,
    /// Arrived, and the losses so far were noticed after it.
    Polled,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_freed_block_that_is_live_in_the_ledger_is_doubtful(
        steps in prop::collection::vec(
            (1..30_u64, any::<bool>(), prop_oneof![8 => Just(Fate::Arrived), 2 => Just(Fate::Lost), 1 => Just(Fate::Polled)]),
            1..300,
        ),
    ) {
        let mut ledger = Ledger::new(0, StackLimits::default());
        let mut alive: HashMap<u64, u64> = HashMap::new();
        let (mut lost_allocs, mut lost_frees) = (0, 0);
        let last = steps.len() - 1;
        for (step, (place, realloc, fate)) in steps.into_iter().enumerate() {
            let (addr, now) = (place * 16, (step as u64 + 1) * STEP_NS);
            let event = if alive.remove(&addr).is_some() {
                lost_frees += u64::from(fate == Fate::Lost);
                let (addr, stack) = (Addr(addr), StackHash(0));
                if realloc {
                    Event::ReallocFree { addr, stack, tid: 1, time_ns: now }
                } else {
                    Event::Free { addr, stack, tid: 1, time_ns: now }
                }
            } else {
                lost_allocs += u64::from(fate == Fate::Lost);
                alive.insert(addr, now);
                alloc(addr, 8, 1, now)
            };
            if fate != Fate::Lost {
                ledger.apply(&event);
            }
            if fate == Fate::Polled || step == last {
                if lost_allocs | lost_frees > 0 {
                    ledger.apply(&Event::Loss { alloc: lost_allocs, free: lost_frees, other: 0, time_ns: now });
                }
                (lost_allocs, lost_frees) = (0, 0);
                for block in ledger.outstanding().iter() {
                    // Being live is not enough: it must be the same allocation.
                    let same = alive.get(&block.addr.0) == Some(&ledger.birth_ns(&block));
                    prop_assert!(same || ledger.is_doubtful(&block), "{block:?}");
                }
                let truly_live = alive.len() as u64;
                let totals = ledger.totals();
                prop_assert!(totals.live - totals.doubtful <= truly_live);
            }
        }
    }
}

fn alloc(addr: u64, size_bytes: u64, stack: u64, time_ns: u64) -> Event<'static> {
    Event::Alloc { addr: Addr(addr), size_bytes, stack: StackHash(stack), tid: 1, how: Default::default(), time_ns }
}

fn free(addr: u64, time_ns: u64) -> Event<'static> {
    Event::Free { addr: Addr(addr), stack: StackHash(0), tid: 1, time_ns }
}

#[test]
fn the_free_that_a_realloc_makes_of_its_own_old_block_is_not_counted_twice() {
    let mut ledger = Ledger::new(0, StackLimits::default());
    let (addr, stack) = (Addr(0x1000), StackHash(0));
    ledger.apply(&alloc(0x1000, 8, 1, STEP_NS));
    ledger.apply(&Event::ReallocFree { addr, stack, tid: 1, time_ns: 2 * STEP_NS });
    ledger.apply(&free(0x1000, 2 * STEP_NS));
    assert_eq!(ledger.stats().unknown_frees, 0);
    // By another thread it is the free of an unknown block.
    ledger.apply(&Event::Free { addr, stack, tid: 2, time_ns: 3 * STEP_NS });
    assert_eq!(ledger.stats().unknown_frees, 1);
}

#[test]
fn a_free_that_one_allocator_forwards_to_another_is_counted_once() {
    let mut ledger = Ledger::new(0, StackLimits::default());
    ledger.apply(&alloc(0x1000, 8, 1, STEP_NS));
    ledger.apply(&free(0x1000, 2 * STEP_NS));
    ledger.apply(&free(0x1000, 2 * STEP_NS));
    assert_eq!((ledger.totals().frees, ledger.stats().handed_on_frees, ledger.stats().unknown_frees), (1, 1, 0));
    // Another block is unknown, and another thread forwards nothing.
    ledger.apply(&free(0x2000, 3 * STEP_NS));
    ledger.apply(&Event::Free { addr: Addr(0x1000), stack: StackHash(0), tid: 2, time_ns: 3 * STEP_NS });
    assert_eq!(ledger.stats().unknown_frees, 2);
}

#[test]
fn stacks_beyond_the_limit_are_counted_and_charged_to_one_id() {
    let mut ledger = Ledger::new(0, StackLimits { stacks_max: 3, frames_max: 4, histograms_max: 1 });
    for hash in 1..=5 {
        ledger.apply(&Event::DefineStack { hash: StackHash(hash), frames: &[hash, 100], end: 1 });
        ledger.apply(&alloc(hash * 16, hash, hash, 0));
    }
    assert_eq!(ledger.stacks_len(), 3);
    assert_eq!(ledger.stats().stacks_refused, 4);
    assert_eq!(ledger.stack(StackId(2)).frames, [1, 100]);
    assert_eq!(ledger.stack(STACKS_BEYOND_LIMIT).totals.live_bytes, 2 + 3 + 4 + 5);
    ledger.apply(&free(5 * 16, 1));
    assert_eq!(ledger.stack(STACKS_BEYOND_LIMIT).totals.frees, 1);
    assert!(ledger.stack_histograms(StackId(2)).is_none());
}

#[test]
fn frames_that_come_after_the_first_use_are_kept_once() {
    let mut ledger = Ledger::new(0, StackLimits { frames_max: 3, ..StackLimits::default() });
    ledger.apply(&alloc(16, 1, 9, 0));
    assert_eq!(ledger.stats().stacks_undefined, 1);
    ledger.apply(&Event::DefineStack { hash: StackHash(9), frames: &[7, 8], end: 1 });
    ledger.apply(&Event::DefineStack { hash: StackHash(9), frames: &[1, 2], end: 2 });
    let view = ledger.stack(StackId(2));
    assert_eq!((view.frames, view.end, view.hash), (&[7, 8][..], 1, StackHash(9)));
    ledger.apply(&Event::DefineStack { hash: StackHash(10), frames: &[1, 2], end: 1 });
    let stats = ledger.stats();
    assert_eq!((stats.frames_refused, stats.stacks_undefined), (1, 1));
}

#[test]
fn a_recording_of_many_days_keeps_doubt_and_lower_bounds_of_lifetimes() {
    const DAY_NS: u64 = 86_400_000_000_000;
    let mut ledger = Ledger::new(5, StackLimits::default());
    ledger.apply(&alloc(16, 1, 1, 5));
    ledger.apply(&Event::Loss { alloc: 0, free: 1, other: 0, time_ns: 10_000 });
    ledger.apply(&alloc(32, 2, 1, 20_000));
    ledger.apply(&alloc(48, 4, 1, 10 * DAY_NS));
    let totals = ledger.totals();
    assert_eq!((totals.doubtful, totals.doubtful_bytes), (1, 1));
    let doubtful: Vec<u64> = ledger.sorted_blocks(|block| ledger.is_doubtful(block)).iter().map(|block| block.addr.0).collect();
    assert_eq!(doubtful, [16]);
    for addr in [16, 32, 48] {
        ledger.apply(&free(addr, 10 * DAY_NS + 3_000));
    }
    assert_eq!(ledger.totals().doubtful, 0);
    let lifetimes = ledger.histograms().lifetimes.counts();
    assert_eq!(lifetimes[2], 1, "3 us");
    let days: u64 = lifetimes[Histogram::bucket(DAY_NS / 1000)..].iter().sum();
    assert_eq!(days, 2, "at least a day");
}

#[test]
fn a_block_is_removed_with_its_mapping_but_not_a_later_one() {
    let mut ledger = Ledger::new(0, StackLimits::default());
    ledger.apply(&alloc(0x10000, 10, 1, STEP_NS));
    ledger.apply(&alloc(0x20000, 20, 1, STEP_NS));
    ledger.apply(&Event::Unmapped { start: Addr(0x10000), end: Addr(0x11000), time_ns: 2 * STEP_NS });
    ledger.apply(&alloc(0x10100, 40, 1, 3 * STEP_NS));
    ledger.settle();
    let stats = ledger.stats();
    assert_eq!((stats.unmapped, stats.unmapped_bytes, stats.missed_frees), (1, 10, 0));
    assert_eq!(ledger.totals().live_bytes, 60);
}

#[test]
fn impossible_allocations_are_refused_and_counted() {
    let mut ledger = Ledger::new(0, StackLimits::default());
    for (addr, size) in [(0, 1), (16, u64::MAX), (u64::MAX, 1), (1 << 56, 1)] {
        ledger.apply(&alloc(addr, size, 1, 0));
    }
    assert_eq!(ledger.stats().implausible, 4);
    assert_eq!(ledger.totals(), LedgerTotals::default());
}

#[test]
fn the_live_bytes_of_ranges_split_a_block_where_the_range_ends() {
    let mut ledger = Ledger::new(0, StackLimits::default());
    for (addr, size) in [(0x0ff0, 0x20), (0x1800, 0), (0x1ff0, 0x1020), (0x9000, 5)] {
        ledger.apply(&alloc(addr, size, 1, 0));
    }
    let ranges = [(Addr(0x1000), Addr(0x2000)), (Addr(0x2000), Addr(0x3000)), (Addr(0x3000), Addr(0x4000))];
    let live: Vec<(u64, u64)> = ledger.live_by_range(&ranges).iter().map(|range| (range.live, range.live_bytes)).collect();
    assert_eq!(live, [(2, 0x20), (0, 0x1000), (0, 0x10)]);
    assert_eq!(ledger.live_in_range(Addr(0), Addr(u64::MAX)), RangeLive { live: 4, live_bytes: 0x20 + 0x1020 + 5 });
}

#[test]
fn a_batch_has_the_same_result_as_its_events_one_by_one() {
    let events: Vec<Event<'_>> =
        (0..5000_u64).map(|n| if n % 3 == 2 { free((n - 1) % 700 * 16 + 16, n) } else { alloc(n % 700 * 16 + 16, n, n % 5, n) }).collect();
    let (mut whole, mut single) = (Ledger::new(0, StackLimits::default()), Ledger::new(0, StackLimits::default()));
    whole.apply_batch(&events);
    events.iter().for_each(|event| single.apply(event));
    assert_eq!((whole.totals(), whole.stats()), (single.totals(), single.stats()));
    assert!(whole.stacks().zip(single.stacks()).all(|(left, right)| left.totals == right.totals));
}

fn any_number() -> impl Strategy<Value = u64> {
    prop_oneof![0..200_u64, any::<u64>(), Just(u64::MAX), (0..64_u32).prop_map(|bit| 1 << bit)]
}

proptest! {
    #[test]
    fn no_event_however_absurd_breaks_the_balance(
        events in prop::collection::vec((0..7_u8, any_number(), any_number(), any_number(), 0..3_u32), 1..200),
    ) {
        let mut ledger = Ledger::new(1000, StackLimits { stacks_max: 10, ..StackLimits::default() });
        for (kind, first, second, time_ns, tid) in events {
            let (addr, stack) = (Addr(first), StackHash(second % 20));
            ledger.apply(&match kind {
                0 | 1 => Event::Alloc { addr, size_bytes: second, stack, tid, how: Default::default(), time_ns },
                2 => Event::Free { addr, stack, tid, time_ns },
                3 => Event::ReallocFree { addr, stack, tid, time_ns },
                4 => Event::ReallocFail { addr, tid },
                5 => Event::Unmapped { start: addr, end: Addr(second), time_ns },
                _ => Event::Loss { alloc: first, free: second, other: first, time_ns },
            });
            let totals = ledger.totals();
            let blocks: Vec<Block> = ledger.outstanding().iter().collect();
            prop_assert_eq!(totals.live_bytes, blocks.iter().map(|block| block.size_bytes).sum::<u64>());
            let doubtful = blocks.iter().filter(|block| ledger.is_doubtful(block)).count() as u64;
            prop_assert_eq!((totals.live, totals.doubtful), (blocks.len() as u64, doubtful));
            let by_stack: u64 = ledger.stacks().map(|view| view.totals.live_bytes).sum();
            prop_assert_eq!(by_stack, totals.live_bytes);
            let peak_by_stack: u64 = ledger.stacks().map(|view| view.totals.at_peak_bytes).sum();
            prop_assert_eq!(peak_by_stack, totals.peak_bytes);
            prop_assert!(blocks.len() > 100 || ledger.live_in_range(Addr(0), Addr(u64::MAX)).live <= totals.live);
        }
        ledger.settle();
    }
}
