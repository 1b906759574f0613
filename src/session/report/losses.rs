//! What was lost, corrected or is doubtful, as text and counters of a profile.

use crate::bpf;
use crate::capture::{Counters, Read, TargetLoss, wire};
use crate::ledger::{LedgerStats, SampledLedger};
use crate::profile::Counter;
use crate::profile::meta::{UNOBSERVED_MS, UNOBSERVED_SPELLS, UNWATCHED_CHILDREN};
use crate::session::tier::exact::Watched;
use crate::units::{HumanBytes, counted, grouped};
use crate::unwind::End;

/// The BPF programs' counters that count losses.
const LOSSES: [bpf::Counter; 12] = [
    bpf::Counter::LostAlloc,
    bpf::Counter::LostFree,
    bpf::Counter::LostStack,
    bpf::Counter::LostVm,
    bpf::Counter::LostLife,
    bpf::Counter::NoThreadState,
    bpf::Counter::NoWalkState,
    bpf::Counter::NotFollowed,
    bpf::Counter::UnknownSite,
    bpf::Counter::LostContents,
    bpf::Counter::PythonUnread,
    bpf::Counter::StringCut,
];

/// Calls in progress when the recording ends, whose returns are not awaited: at most this many, and at most the number of calls recorded.
const OPEN_CALLS_MAX: u64 = 1024;

/// Corrections of the ledger, by kind.
pub fn corrections(stats: &[LedgerStats]) -> Vec<Counter> {
    let sum = |of: fn(&LedgerStats) -> u64| stats.iter().map(of).fold(0, u64::saturating_add);
    vec![
        Counter::new("proven_free", sum(|s| s.pruned), "blocks that a census proved free: the record of their free was lost"),
        Counter::new("proven_free_bytes", sum(|s| s.pruned_bytes), "bytes of them"),
        Counter::new(
            "handed_out_again",
            sum(|s| s.missed_frees),
            "blocks whose address was returned by another allocation without a free in between",
        ),
        Counter::new("handed_out_again_bytes", sum(|s| s.missed_free_bytes), "bytes of them"),
        Counter::new("unmapped", sum(|s| s.unmapped), "blocks whose mapping was removed"),
        Counter::new("unmapped_bytes", sum(|s| s.unmapped_bytes), "bytes of them"),
    ]
}

/// Hits that the kernel had lost by the end of a recording, after all records have been read.
pub fn unaccounted_at_the_end(counters: &Counters, read: Read) -> u64 {
    counters.unaccounted_hits(read.calls, read.calls.min(OPEN_CALLS_MAX))
}

/// Hits that the kernel has lost so far. Up to a full ring of records may still be unread.
pub fn unaccounted_so_far(counters: &Counters, read: Read, ring_bytes: u32) -> u64 {
    counters.unaccounted_hits(read.calls, u64::from(ring_bytes) / wire::FREE_BYTES)
}

/// Losses by kind; a zero shows that the kind is counted. `unaccounted`: hits that the kernel lost.
pub fn losses(counters: &Counters, read: Read, unaccounted: u64, notices_lost: u64, inherited_refused: u64) -> Vec<Counter> {
    let loss = |counter: bpf::Counter| Counter::new(counter.words().0, counters.get(counter), counter.words().1);
    let mut losses: Vec<Counter> = LOSSES.into_iter().map(loss).collect();
    losses.push(Counter::new(
        "unaccounted_hits",
        unaccounted,
        "probe hits for which there is neither a record nor a reason: the kernel lost them",
    ));
    losses.push(Counter::new("malformed_records", read.malformed, "records that could not be read"));
    losses.push(Counter::new(
        "lost_notices",
        notices_lost,
        "notices of new code or children beyond the limit of the queue; every process was examined again",
    ));
    losses.push(Counter::new(
        "children_without_books",
        inherited_refused,
        "children whose parent had too many blocks to copy its ledger: the memory that they inherited is unattributed",
    ));
    losses
}

/// Why walks ended, for each reason that occurred.
pub fn stack_ends(counters: &Counters) -> Vec<Counter> {
    let all = End::ALL.iter().map(|&end| (end, counters.ends(end))).filter(|(_, value)| *value > 0);
    all.map(|(end, value)| Counter::new(snake_case(&format!("{end:?}")), value, end.description())).collect()
}

/// `NoMapping` → `no_mapping`.
fn snake_case(name: &str) -> String {
    let mut snake = String::with_capacity(name.len() + 4);
    for c in name.chars() {
        if c.is_ascii_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.push(c.to_ascii_lowercase());
    }
    snake
}

/// Intervals of watched processes that were not observed, and processes that should have been watched but were not.
pub fn unobserved(stats: &[LedgerStats], unwatched_children: u64) -> [Counter; 3] {
    let sum = |of: fn(&LedgerStats) -> u64| stats.iter().map(of).fold(0, u64::saturating_add);
    let spells = sum(|s| s.gaps);
    // Rounded up: an interval shorter than a millisecond is not reported as 0.
    let ms = sum(|s| s.gap_ns).div_ceil(1_000_000);
    [
        Counter::new(UNOBSERVED_SPELLS, spells, "intervals in which a new image, child or library ran before its probes were attached"),
        Counter::new(UNOBSERVED_MS, ms, "total length of these intervals in milliseconds"),
        Counter::new(UNWATCHED_CHILDREN, unwatched_children, "children that could not be watched"),
    ]
}

/// A warning if the kernel lost probe hits or delivered hits of an unknown site.
pub fn lost_by_the_kernel(counters: &Counters, read: Read, unaccounted: u64) -> Option<String> {
    let lost = unaccounted.saturating_add(counters.get(bpf::Counter::UnknownSite));
    let hits = counters.get(bpf::Counter::Hit);
    (lost > 0).then(|| match read.calls {
        0 => format!(
            "{} without a single record: the recording is empty because this kernel lost them, not because nothing was allocated; \
             `fragprof doctor` shows what the kernel can do",
            counted(hits, "probe hit")
        ),
        _ => format!("of {} the kernel lost {}: these allocations and frees are missing", counted(hits, "probe hit"), grouped(lost)),
    })
}

/// Reasons to doubt this process's figures.
pub fn doubts(loss: TargetLoss, watched: &Watched) -> Vec<String> {
    if let Some(sampled) = &watched.sampled {
        return sampled_doubts(loss, watched, sampled);
    }
    let stats = watched.ledger.stats();
    let totals = watched.ledger.totals();
    let mut doubts = Vec::new();
    let mut doubt = |count: u64, text: String| {
        if count > 0 {
            doubts.push(text);
        }
    };
    doubt(
        loss.allocations + loss.frees,
        format!(
            "{} and {} were lost: {} ({}) may be free already, and some live ones may be missing",
            counted(loss.allocations, "allocation record"),
            counted(loss.frees, "free record"),
            counted(totals.doubtful, "live block"),
            HumanBytes(totals.doubtful_bytes)
        ),
    );
    doubt(stats.gaps, format!("it was not observed for {:.3} s in {}", stats.gap_ns as f64 / 1e9, counted(stats.gaps, "interval")));
    doubt(loss.abandoned, format!("{} never returned: whether they allocated is unknown", counted(loss.abandoned, "allocator call")));
    doubt(
        stats.missed_frees,
        format!(
            "{} ({}) were freed without a record: their addresses were returned by later allocations",
            counted(stats.missed_frees, "block"),
            HumanBytes(stats.missed_free_bytes)
        ),
    );
    doubt(
        stats.pruned,
        format!(
            "{} ({}) were freed without a record: a census found them free",
            counted(stats.pruned, "block"),
            HumanBytes(stats.pruned_bytes)
        ),
    );
    doubt(stats.stacks_refused, format!("{} beyond the limit are summed in one row", counted(stats.stacks_refused, "stack")));
    doubt(stats.stacks_undefined, format!("{} were lost: their allocations are in one row", counted(stats.stacks_undefined, "stack")));
    doubt(watched.past_dropped, format!("{} before earlier execs are not in the profile", counted(watched.past_dropped, "image")));
    doubts
}

/// Reasons to doubt the estimates of this process.
fn sampled_doubts(loss: TargetLoss, watched: &Watched, ledger: &SampledLedger) -> Vec<String> {
    let stats = ledger.stats();
    let mut doubts = Vec::new();
    let mut doubt = |count: u64, text: String| {
        if count > 0 {
            doubts.push(text);
        }
    };
    doubt(
        loss.allocations + loss.frees,
        format!(
            "{} samples and {} of their frees were lost: live bytes by stack are wrong by what they represent",
            loss.allocations, loss.frees
        ),
    );
    doubt(stats.gaps, format!("it was not observed for {:.3} s in {}", stats.gap_ns as f64 / 1e9, counted(stats.gaps, "interval")));
    doubt(
        stats.missed_frees,
        format!("{} sampled blocks were freed without a record: their addresses were returned by later allocations", stats.missed_frees),
    );
    doubt(
        stats.pruned,
        format!("{} sampled blocks whose frees may have been lost were not live in the census and were removed", stats.pruned),
    );
    doubt(stats.implausible, format!("{} samples with an impossible address or weight were rejected", stats.implausible));
    doubt(
        stats.refused,
        format!("{} samples beyond the limit of {} live ones are not in the live bytes", stats.refused, crate::ledger::LIVE_MAX),
    );
    let (refused, undefined) = ledger.stacks_missing();
    doubt(refused, format!("{refused} stacks beyond the limit are summed in one row"));
    doubt(undefined, format!("{undefined} stacks were lost: their allocations are in one row"));
    doubt(watched.past_dropped, format!("{} images before earlier execs are not in the profile", watched.past_dropped));
    doubts
}
