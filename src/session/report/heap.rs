//! The heap at one moment of a recording: the allocator's own account joined with the ledger by address or, if no census can read the
//! allocator, what the recorded blocks and the mappings show.

use std::cell::RefCell;
use std::thread::LocalKey;

use crate::allocator::footprint::Footprint;
use crate::census::live::LiveMemory;
use crate::census::memory::{Memory, MemoryError};
use crate::census::resident::{heap_ranges, pages_of};
use crate::census::runtime::RuntimeMemory;
use crate::census::{self, LayoutCache, Level, Pace, Taken};
use crate::fragmentation::survey::Survey;
use crate::heap::extents::{Coverage, Extents, RegionKind};
use crate::heap::ladder::known;
use crate::ledger::Ledger;
use crate::process::{Maps, Process};
use crate::profile::{Attribution, HeapSummary};
use crate::session::report::attribution::{Owned, StartHeap, is_disproved};
use crate::session::report::unattributed::{self, Part};
use crate::units::{HumanBytes, Pid};

/// State of the heap, attributed to stacks.
#[derive(Debug, Default)]
pub struct HeapPicture {
    /// The totals of the heap, from resident to live bytes.
    pub summary: HeapSummary,
    /// Live, pinned and blocked bytes by stack.
    pub owned: Owned,
    /// The live bytes by attribution; `None` if no census counts them.
    pub attribution: Option<Attribution>,
    /// Memory that no stack owns, by holder, if requested: it replaces the two rows.
    pub rest: Option<Vec<Part>>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

impl HeapPicture {
    fn add_owners(&mut self, memory: &LiveMemory, pid: Pid, taken: &Taken, ledger: &Ledger, before: &Before) {
        match unattributed::by_owner(memory, pid.0, taken, ledger, before.heap()) {
            Ok(parts) => self.rest = Some(parts),
            Err(error) => self.notes.push(format!("the holders of memory that no stack owns are not known: {error}")),
        }
    }
}

/// The heap's contents before the recording.
#[derive(Debug, Clone, Default)]
pub enum Before {
    /// Nothing: the process or its image began with the recording.
    Nothing,
    /// The result of a census.
    Heap(std::sync::Arc<StartHeap>),
    /// Not known.
    #[default]
    Unknown,
}

impl Before {
    /// The result of a census, unless it has more than `chunks_max` chunks.
    ///
    /// # Errors
    /// The number of chunks, if it is above the limit.
    pub fn of(taken: Taken, chunks_max: usize) -> Result<Self, usize> {
        let tables: Vec<_> = taken.heaps.into_iter().map(|heap| heap.chunks).collect();
        let chunks: usize = tables.iter().map(census::ChunkTable::len).sum();
        if chunks > chunks_max { Err(chunks) } else { Ok(Self::Heap(std::sync::Arc::new(StartHeap { tables }))) }
    }

    fn heap(&self) -> Option<&StartHeap> {
        match self {
            Self::Heap(heap) => Some(heap),
            Self::Nothing | Self::Unknown => None,
        }
    }
}

/// Examines the heap of a process that is still alive. `None` if it has ended or may not be read.
///
/// If records were lost, blocks that the census proves free are first removed from the ledger. `with_owners` also determines what holds the
/// memory that no stack owns.
pub fn picture(
    pid: Pid,
    ledger: &mut Ledger,
    extents: &mut Extents,
    footprint: Footprint,
    before: &Before,
    with_owners: bool,
    heaps: Heaps,
) -> Option<HeapPicture> {
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    ledger.settle();
    let taken = match census_of(&memory, pid, &comm, Level::Full, heaps) {
        Ok(taken) => Some(taken),
        Err(error) => {
            tracing::debug!("census of {pid}: {error}");
            None
        }
    };
    match taken {
        Some(taken) if is_usable(&taken) => {
            let mut picture = join(&memory, ledger, &taken, before)?;
            if with_owners {
                picture.add_owners(&memory, pid, &taken, ledger, before);
            }
            Some(picture)
        }
        taken => {
            let mut picture = from_ledger(&memory, ledger, extents, footprint)?;
            picture.notes.extend(taken.and_then(|taken| unusable(&taken)));
            Some(picture)
        }
    }
}

/// Why a census cannot be joined with a recording.
pub fn unusable(taken: &Taken) -> Option<String> {
    if let Some(reason) = taken.census.layout_unknown.first() {
        return Some(reason.clone());
    }
    (!taken.census.walk.usable && !taken.heaps.is_empty()).then(|| {
        format!(
            "the census at the end is not usable: {} of the heap could not be read or parsed",
            HumanBytes(taken.census.walk.unknown_bytes)
        )
    })
}

/// The heaps whose blocks are recorded, and that are joined with the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Heaps {
    /// malloc's.
    #[default]
    Malloc,
    /// Also that of CPython's objects.
    WithObjects,
}

impl Heaps {
    /// Those of a recording with or without CPython's objects.
    pub fn recorded(with_objects: bool) -> Self {
        if with_objects { Self::WithObjects } else { Self::Malloc }
    }

    fn layouts(self) -> &'static LocalKey<RefCell<LayoutCache>> {
        match self {
            Self::Malloc => &OF_MALLOC,
            Self::WithObjects => &WITH_OBJECTS,
        }
    }
}

thread_local! {
    /// Layout data of allocators' files that this thread's censuses have learned. One per thread: with a lock the driver would wait for the
    /// walker.
    static OF_MALLOC: RefCell<LayoutCache> = RefCell::new(LayoutCache::of_malloc());
    static WITH_OBJECTS: RefCell<LayoutCache> = RefCell::default();
}

/// Takes a census, without the memory outside these heaps.
pub fn census_of(memory: &LiveMemory, pid: Pid, comm: &str, level: Level, heaps: Heaps) -> Result<Taken, MemoryError> {
    let options = census::Options { level, pace: Pace::default(), with_not_malloc: false };
    heaps.layouts().with_borrow_mut(|layouts| census::take(memory, pid.0, comm, options, layouts))
}

/// A heap's bytes in a census; `None` = no census can determine them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeapBytes {
    /// Free bytes that it holds.
    pub free: Option<u64>,
    /// Bytes of chunks in use, including rounding.
    pub live: Option<u64>,
}

/// A process's heap now, from a census that samples large heaps.
pub fn bytes(pid: Pid, heaps: Heaps) -> HeapBytes {
    let Some(taken) = look(pid, Level::Sampled, heaps) else { return HeapBytes::default() };
    let live = |heap: &census::HeapAccount| heap.ladder.live_bytes.or(heap.live_bytes_est);
    let free = |heap: &census::HeapAccount| live(heap).map(|live| heap.ladder.extent_bytes.saturating_sub(live));
    let heaps = &taken.census.heaps;
    HeapBytes {
        free: heaps.iter().filter_map(free).reduce(u64::saturating_add),
        live: heaps.iter().filter_map(live).reduce(u64::saturating_add),
    }
}

/// The heap totals of a process now; `None` if no census can determine them.
pub fn ladder(pid: Pid) -> Option<HeapSummary> {
    look(pid, Level::Full, Heaps::Malloc).filter(is_usable).map(|taken| summary(&taken))
}

/// The same, with every chunk for a later comparison, unless there are more than `chunks_max`.
pub fn at_start(pid: Pid, chunks_max: usize) -> Option<(HeapSummary, Before)> {
    let taken = look(pid, Level::Full, Heaps::Malloc).filter(is_usable)?;
    let summary = summary(&taken);
    Some((summary, Before::of(taken, chunks_max).unwrap_or_default()))
}

/// The heap now, joined with a ledger that holds every block since some moment; `None` if no census can read the heap.
pub fn joined(pid: Pid, ledger: &mut Ledger, before: &Before) -> Option<HeapPicture> {
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    ledger.settle();
    let taken = census_of(&memory, pid, &comm, Level::Full, Heaps::Malloc).ok().filter(is_usable)?;
    join(&memory, ledger, &taken, before)
}

fn is_usable(taken: &Taken) -> bool {
    taken.census.walk.usable && !taken.heaps.is_empty()
}

/// Removes blocks that the census proves free from a ledger that lost records, and joins the two.
fn join(memory: &LiveMemory, ledger: &mut Ledger, taken: &Taken, before: &Before) -> Option<HeapPicture> {
    if ledger.is_lossy() {
        ledger.prune(|block| !is_disproved(&taken.heaps, block));
    }
    from_census(memory, ledger, taken, before)
}

/// A census of a process; `None` if the process has ended or may not be read.
fn look(pid: Pid, level: Level, heaps: Heaps) -> Option<Taken> {
    let process = Process::open(pid).ok()?;
    let comm = process.comm().to_owned();
    let memory = LiveMemory::open(process).ok()?;
    census_of(&memory, pid, &comm, level, heaps).ok()
}

/// Least resident memory of a runtime that is reported.
const MANAGED_BYTES_MIN: u64 = 1 << 20;

/// The memory that runtimes manage themselves in a process, outside malloc, where a recording of malloc does not see it: a sentence each.
/// Empty if the process has ended or may not be read.
pub fn managed_beside(pid: Pid, heaps: Heaps) -> Vec<String> {
    let taken = || {
        let process = Process::open(pid).ok()?;
        let comm = process.comm().to_owned();
        let memory = LiveMemory::open(process).ok()?;
        let options = census::Options { level: Level::Sampled, pace: Pace::default(), with_not_malloc: true };
        heaps.layouts().with_borrow_mut(|layouts| census::take(&memory, pid.0, &comm, options, layouts)).ok()
    };
    let Some(taken) = taken() else { return Vec::new() };
    let found = taken.census.runtimes.memory.iter().filter(|one| one.resident_bytes >= MANAGED_BYTES_MIN);
    let sentence = |one: &RuntimeMemory| {
        let recorded_by = one.recorded_by().map_or_else(String::new, |how| format!("; {how}"));
        format!(
            "{} resident are {}, outside malloc: this recording does not have them{recorded_by}",
            HumanBytes(one.resident_bytes),
            one.kind
        )
    };
    found.map(sentence).collect()
}

/// The heap totals of a census at level full; a rung that some heaps do not have is that of the others.
pub fn summary(taken: &Taken) -> HeapSummary {
    let ladders = taken.census.heaps.iter().map(|heap| heap.ladder);
    ladders.reduce(|a, b| a.and(b, known)).map(|ladder| ladder.map(Some)).unwrap_or_default()
}

fn from_census(memory: &LiveMemory, ledger: &Ledger, taken: &Taken, before: &Before) -> Option<HeapPicture> {
    let mut picture = HeapPicture { summary: summary(taken), ..HeapPicture::default() };
    let mut by_sums = false;
    for walk in &taken.heaps {
        if walk.chunks.is_empty() {
            // Only once: a second heap without chunks would attribute the same stacks' bytes again.
            let ledger = if by_sums { &Ledger::new(0, Default::default()) } else { ledger };
            picture.owned.add_sums(ledger, walk.account.ladder.live_bytes.unwrap_or(0), walk.account.live_allocations.unwrap_or(0));
            by_sums = true;
            continue;
        }
        let states = pages_of(memory, heap_ranges(&walk.chunks).into_iter().map(|range| range.range))?;
        picture.owned.add(ledger, walk, before.heap(), &states);
    }
    if by_sums {
        picture.notes.push(
            "this allocator's single chunks are not known: stacks have their live bytes as requested, the rest is unattributed".into(),
        );
    } else {
        // The sum of the rows, whatever changed between the walk and the check of its pages.
        picture.summary.pinned_bytes = Some(picture.owned.pinned.total_bytes());
    }
    let huge = picture.owned.pinned_on_huge_pages_bytes;
    if huge > 0 {
        picture.notes.push(format!(
            "{} of the pinned bytes lie on huge pages, which count as pages of 2 MiB; a trim splits them, so trimmable counts pages of 4 \
             KiB",
            HumanBytes(huge)
        ));
    }
    if matches!(before, Before::Unknown) {
        picture.notes.push("no census could be taken at the start: memory allocated before it is part of [unattributed]".into());
    }
    picture.attribution = Some(picture.owned.attribution());
    Some(picture)
}

fn from_ledger(memory: &LiveMemory, ledger: &Ledger, extents: &mut Extents, footprint: Footprint) -> Option<HeapPicture> {
    extents.resync(&mappings_of(&memory.maps().ok()?));
    let blocks = ledger.sorted_blocks(|_| true);
    let footprint = footprint.seen_in(blocks.iter());
    let mut ranges = extents.heap_ranges(blocks.iter().map(|block| block.addr.0));
    if ledger.is_lossy() {
        // Gaps between blocks are not known to be free.
        ranges.iter_mut().for_each(|range| range.coverage = Coverage::Partial);
    }
    let states = pages_of(memory, ranges.iter().map(|range| range.range.clone()))?;
    let survey = Survey::new(&ranges, blocks.iter().map(|block| footprint.span(&block)), &states);
    let summary = survey.ladder().map(Some);
    let note = "the heap's figures are from the recorded blocks and the mappings alone: no census can read this allocator".to_owned();
    let owned = Owned { pinned: survey.pinned.bytes, ..Owned::default() };
    Some(HeapPicture { summary, owned, notes: vec![note], ..HeapPicture::default() })
}
/// The mappings as [`Extents`] takes them.
pub fn mappings_of(maps: &Maps) -> Vec<crate::heap::extents::Mapping> {
    use crate::process::Backing;
    maps.mappings
        .iter()
        .map(|mapping| crate::heap::extents::Mapping {
            range: mapping.start.0..mapping.end.0,
            kind: match &mapping.backing {
                Backing::Named(name) if name == "[heap]" => RegionKind::Brk,
                Backing::Anonymous if !mapping.permissions.shared => RegionKind::Anonymous,
                Backing::Named(name) if name.starts_with("[anon:") && !mapping.permissions.shared => RegionKind::Anonymous,
                _ => RegionKind::NotHeap,
            },
            writable: mapping.permissions.write,
        })
        .collect()
}
