//! The ledger's speed, and its memory per live block: `cargo bench --bench ledger [-- PAIRS]`.
//!
//! Two heaps, of 1 M and 10 M live blocks of 1000 stacks, under a steady churn: a random block is freed, and one of the free addresses
//! is allocated again. The baseline does the minimum for the same result, in the same run: a std `HashMap` with foldhash from
//! address to (size, stack, birth), and live bytes by stack. Rounds of both alternate, and the best of each counts, because the
//! machine may be shared. Times are CPU time of the one thread.

use std::collections::HashMap;
use std::hint::black_box;
use std::time::Duration;

use foldhash::fast::RandomState;
use fragprof::allocator::footprint::Footprint;
use fragprof::fragmentation::survey::Survey;
use fragprof::heap::extents::{Coverage, HeapRange, RegionKind};
use fragprof::heap::pages::AllResident;
use fragprof::ledger::{Event, Ledger, StackLimits};
use fragprof::units::{Addr, StackHash};
use rustix::time::{ClockId, clock_gettime};

const STACKS: u64 = 1000;
const BATCH: usize = 1024;
/// Events of one round: half a second of two threads at full speed.
const EVENTS: usize = 2_000_000;

/// A small generator (splitmix64), so that every run has the same heap.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        ((u128::from(self.next()) * end as u128) >> 64) as usize
    }
}

/// A heap with churning blocks.
struct Churn {
    random: Random,
    live: Vec<u64>,
    free: Vec<u64>,
    time_ns: u64,
}

impl Churn {
    fn new(live: usize) -> Self {
        let addr = |index: usize| 0x5555_5555_0000 + index as u64 * 96;
        Self {
            random: Random(live as u64),
            live: (0..live).map(addr).collect(),
            free: (live..live + live / 8).map(addr).collect(),
            time_ns: 1,
        }
    }

    fn alloc(&mut self, addr: u64) -> Event<'static> {
        self.time_ns += 250;
        let random = self.random.next();
        Event::Alloc {
            addr: Addr(addr),
            size_bytes: 16 + random % 64,
            stack: StackHash(1 + (random >> 32) % STACKS),
            tid: 1,
            how: Default::default(),
            time_ns: self.time_ns,
        }
    }

    fn fill(&mut self) -> Vec<Event<'static>> {
        (0..self.live.len()).map(|index| self.alloc(self.live[index])).collect()
    }

    fn round(&mut self) -> Vec<Event<'static>> {
        let mut events = Vec::with_capacity(EVENTS);
        while events.len() < EVENTS {
            let (victim, place) = (self.random.below(self.live.len()), self.random.below(self.free.len()));
            self.time_ns += 250;
            events.push(Event::Free { addr: Addr(self.live[victim]), stack: StackHash(0), tid: 1, time_ns: self.time_ns });
            std::mem::swap(&mut self.live[victim], &mut self.free[place]);
            let addr = self.live[victim];
            events.push(self.alloc(addr));
        }
        events
    }
}

/// The minimum that gives live bytes by stack.
#[derive(Default)]
struct Baseline {
    blocks: HashMap<u64, (u64, u32, u64), RandomState>,
    ids: HashMap<u64, u32, RandomState>,
    live_bytes: Vec<u64>,
}

impl Baseline {
    fn apply(&mut self, events: &[Event<'_>]) {
        for event in events {
            match *event {
                Event::Alloc { addr, size_bytes, stack, time_ns, .. } => {
                    let next = self.live_bytes.len() as u32;
                    let id = *self.ids.entry(stack.0).or_insert(next);
                    if id == next {
                        self.live_bytes.push(0);
                    }
                    self.live_bytes[id as usize] += size_bytes;
                    self.blocks.insert(addr.0, (size_bytes, id, time_ns));
                }
                Event::Free { addr, .. } => {
                    if let Some((size_bytes, id, birth_ns)) = self.blocks.remove(&addr.0) {
                        self.live_bytes[id as usize] -= size_bytes;
                        black_box(birth_ns);
                    }
                }
                _ => {}
            }
        }
    }

    fn table_bytes(&self) -> usize {
        // hashbrown: a power of two of buckets, loaded to 7/8, each an entry and a control byte.
        let buckets = (self.blocks.capacity() * 8 / 7).next_power_of_two();
        buckets * (size_of::<(u64, (u64, u32, u64))>() + 1)
    }
}

/// CPU time of this thread: other work on the machine is not counted, except for its effect on the caches.
fn cpu_time() -> Duration {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Millions of events per second of CPU time.
fn rate(events: usize, work: impl FnOnce()) -> f64 {
    let start = cpu_time();
    work();
    events as f64 / (cpu_time() - start).as_secs_f64() / 1e6
}

fn measure(live: usize, pairs: usize) {
    let mut churn = Churn::new(live);
    let mut ledger = Ledger::new(0, StackLimits::default());
    let mut baseline = Baseline::default();
    let fill = churn.fill();
    let mut pause = Duration::ZERO;
    let fill_ledger = rate(live, || {
        for batch in fill.chunks(BATCH) {
            let start = cpu_time();
            ledger.apply_batch(batch);
            pause = pause.max(cpu_time() - start);
        }
    });
    let fill_baseline = rate(live, || fill.chunks(BATCH).for_each(|batch| baseline.apply(batch)));
    drop(fill);
    let (mut best, mut best_baseline) = (0_f64, 0_f64);
    for _ in 0..pairs {
        let events = churn.round();
        best = best.max(rate(EVENTS, || events.chunks(BATCH).for_each(|batch| ledger.apply_batch(batch))));
        best_baseline = best_baseline.max(rate(EVENTS, || events.chunks(BATCH).for_each(|batch| baseline.apply(batch))));
    }
    assert_eq!(ledger.totals().live_bytes, baseline.live_bytes.iter().sum::<u64>(), "both have the same live bytes");
    let per_block = ledger.table_bytes() as f64 / live as f64;
    let per_block_baseline = baseline.table_bytes() as f64 / live as f64;
    println!("{} M live blocks", live / 1_000_000);
    println!("  churn  {best:6.1} M events/s   {:5.2} x HashMap+foldhash ({best_baseline:.1})", best / best_baseline);
    println!("  fill   {fill_ledger:6.1} M events/s   {:5.2} x HashMap+foldhash ({fill_baseline:.1})", fill_ledger / fill_baseline);
    println!(
        "  memory {per_block:6.1} B per block      {:5.2} x HashMap+foldhash ({per_block_baseline:.1})",
        per_block / per_block_baseline
    );
    println!("  longest batch of {BATCH} while filling {:6.1} ms", pause.as_secs_f64() * 1e3);
    let view = |name: &str, look: &mut dyn FnMut()| {
        let start = cpu_time();
        look();
        println!("  {name:<32} {:8.2} ms", (cpu_time() - start).as_secs_f64() * 1e3);
    };
    let (start, end) = (Addr(0x5555_5555_0000), Addr(0x5555_5555_0000 + live as u64 * 48));
    view("totals of all stacks", &mut || {
        black_box(ledger.stacks().map(|stack| stack.totals.live_bytes).sum::<u64>());
    });
    view("live bytes of one range", &mut || {
        black_box(ledger.live_in_range(start, end));
    });
    let ranges: Vec<_> = (0..64).map(|i| (Addr(start.0 + i * (1 << 24)), Addr(start.0 + (i + 1) * (1 << 24)))).collect();
    view("live bytes of 64 ranges", &mut || drop(black_box(ledger.live_by_range(&ranges))));
    for range in 0..1000 {
        let start = 0x7f00_0000_0000 + range * (1 << 20);
        ledger.apply(&Event::Unmapped { start: Addr(start), end: Addr(start + (1 << 18)), time_ns: churn.time_ns });
    }
    view("1000 unmapped ranges searched for", &mut || ledger.settle());
    let mut sorted = None;
    view("all blocks sorted by address", &mut || sorted = Some(ledger.sorted_blocks(|_| true)));
    let Some(sorted) = sorted else { return };
    let end = sorted.iter().last().map_or(0, |block| block.addr.0).next_multiple_of(4096) + 4096;
    let heap = [HeapRange { range: 0x5555_5555_0000..end, kind: RegionKind::Brk, coverage: Coverage::Complete }];
    view("pages and pinning of the heap", &mut || {
        black_box(Survey::new(&heap, sorted.iter().map(|block| Footprint::Glibc.span(&block)), &AllResident).pinned.pages);
    });
}

fn main() {
    let pairs = std::env::args().filter_map(|arg| arg.parse().ok()).next().unwrap_or(5);
    for live in [1_000_000, 10_000_000] {
        measure(live, pairs);
    }
}
