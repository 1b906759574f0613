//! The ladder of each process's heaps, and its other resident memory.
//!
//! Bounded: the processes with the most resident memory have series of their own; the rest is summed in `pid="other", comm="other"`.
//! Names of processes are shown without control characters, so that no name breaks a line or a terminal.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use super::family::Family;
use super::labels::Labels;
use crate::fragmentation::verdict::Kind;
use crate::model::sample::{HeapSample, ProcessSample};
use crate::model::snapshot::Snapshot;
use crate::model::view::ProcessView;
use crate::process::container::CgroupMemory;

type Figure = fn(&HeapSample) -> Option<u64>;

/// Name, help and source. `{pid, comm, allocator}` each.
const HEAP: [(&str, &str, Figure); 19] = [
    (
        "fragprof_heap_extent_bytes",
        "Address space that the allocator holds, from the newest census of any level. Exact at rest; under load off by what changes during a census.",
        |heap| Some(heap.ladder.extent_bytes),
    ),
    (
        "fragprof_heap_resident_bytes",
        "Part of the extent that is in RAM. Exact to the page at rest; between full censuses the pages of blocks with mappings of their own are carried over from the last full one (and not counted before the first).",
        |heap| Some(heap.ladder.resident_bytes),
    ),
    (
        "fragprof_heap_swapped_bytes",
        "Part of the extent that is in swap. Between full censuses without blocks that have mappings of their own.",
        |heap| Some(heap.details.swapped_bytes),
    ),
    (
        "fragprof_heap_huge_bytes",
        "Part of the extent that is in RAM in huge pages; 0 on kernels before 6.7, which do not report it. Between full censuses without blocks that have mappings of their own.",
        |heap| Some(heap.details.huge_bytes),
    ),
    (
        "fragprof_heap_live_bytes",
        "Chunks in use with their rounding, including those with mappings of their own, as of the last full census. Exact at rest; mean error at most 0.5 % at 2 million operations per second.",
        |heap| heap.ladder.live_bytes,
    ),
    (
        "fragprof_heap_live_bytes_est",
        "Estimate of the live bytes from random windows, for heaps too large to be walked; its standard error is fragprof_heap_live_bytes_stderr.",
        |heap| heap.live_bytes_est,
    ),
    ("fragprof_heap_live_bytes_stderr", "Standard error of fragprof_heap_live_bytes_est.", |heap| heap.live_bytes_stderr),
    (
        "fragprof_heap_live_allocations",
        "Number of chunks in use as of the last full census; error as for fragprof_heap_live_bytes.",
        |heap| heap.live_allocations,
    ),
    ("fragprof_heap_cached_bytes", "Freed chunks in thread caches and fastbins, as of the last full census. Exact at rest.", |heap| {
        heap.details.cached_bytes
    }),
    ("fragprof_heap_free_bytes", "Freed chunks in the allocator's bins, as of the last full census. Exact at rest.", |heap| {
        heap.free_bytes
    }),
    ("fragprof_heap_top_bytes", "Free memory at the top of heaps, from the newest census of any level. Exact at rest.", |heap| {
        Some(heap.top_bytes)
    }),
    ("fragprof_heap_overhead_bytes", "The allocator's own data in the extent, as of the last full census.", |heap| heap.overhead_bytes),
    (
        "fragprof_heap_trimmable_bytes",
        "What malloc_trim(0), or a purge, would have released at the last full census: a prediction, right within 1 % or 256 KiB at rest.",
        |heap| heap.ladder.trimmable_bytes,
    ),
    (
        "fragprof_heap_pinned_bytes",
        "Free bytes on resident pages that also hold live bytes, as of the last full census: no trim releases them. Exact at rest.",
        |heap| heap.ladder.pinned_bytes,
    ),
    (
        "fragprof_heap_kept_bytes",
        "Resident whole free pages that a trim leaves (thread caches, tops of other arenas), as of the last full census.",
        |heap| heap.details.kept_bytes,
    ),
    (
        "fragprof_heap_unknown_bytes",
        "Part of the extent that was not understood or not read at the last full census: the error of all other steps. Above 1 % fragprof_census_usable is 0.",
        |heap| heap.ladder.unknown_bytes,
    ),
    (
        "fragprof_heap_mmapped_bytes",
        "Chunks with mappings of their own, part of the extent, from the newest census of any level.",
        |heap| Some(heap.mmapped_bytes),
    ),
    ("fragprof_heap_arenas", "Arenas of the heap, from the newest census of any level. Exact.", |heap| Some(heap.arenas)),
    (
        "fragprof_heap_largest_arena_extent_bytes",
        "Extent of the largest arena, from the newest census of any level; for pid=\"other\" the sum over processes.",
        |heap| Some(heap.arena_extent_bytes_max),
    ),
];

/// Processes with series of their own, each with its labels and its view, and those without.
struct Ranked<'a> {
    own: Vec<(&'a ProcessSample, Labels, ProcessView)>,
    other: Vec<&'a ProcessSample>,
}

/// The families of all processes, and how many processes are in `other`. None if processes have no series.
pub fn families(snapshot: &Snapshot, now: Instant) -> (Vec<Family>, usize) {
    if snapshot.metrics_processes_max == 0 {
        return (Vec::new(), 0);
    }
    let mut order: Vec<&Arc<ProcessSample>> = snapshot.processes.iter().collect();
    order.sort_by_key(|one| (std::cmp::Reverse(one.rss_bytes), one.identity));
    let (own, other) = order.split_at(snapshot.metrics_processes_max.min(order.len()));
    let ranked = Ranked {
        own: own.iter().map(|one| (one.as_ref(), Labels::of(one), ProcessView::of(one, now))).collect(),
        other: other.iter().map(|one| one.as_ref()).collect(),
    };
    let mut families: Vec<Family> = HEAP.iter().map(|&(name, help, figure)| heap_family(name, help, figure, &ranked)).collect();
    families.push(fragmentation(&ranked));
    families.push(resident(&ranked));
    families.push(not_malloc(&ranked));
    families.push(verdicts(&ranked));
    families.extend(changes(&ranked));
    families.extend(rates(&ranked));
    families.push(attributed(&ranked));
    families.extend(censuses(&ranked, now));
    families.extend(containers(&ranked));
    families.push(workloads(&ranked));
    (families, ranked.other.len())
}

fn heap_family(name: &'static str, help: &'static str, figure: Figure, ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(name, help);
    for (process, labels, _) in &ranked.own {
        for heap in &process.heaps {
            if let Some(value) = figure(heap) {
                family.add(&labels.with(&[("allocator", &heap.allocator)]), value as f64);
            }
        }
    }
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for heap in ranked.other.iter().flat_map(|process| &process.heaps) {
        if let Some(value) = figure(heap) {
            let sum = sums.entry(&heap.allocator).or_default();
            *sum = sum.saturating_add(value);
        }
    }
    for (allocator, sum) in sums {
        family.add(&Labels::other().with(&[("allocator", allocator)]), sum as f64);
    }
    family
}

fn fragmentation(ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(
        "fragprof_process_fragmentation_ratio",
        "1 - resident live bytes / resident bytes of all heaps of the process, 0 is perfect (live bytes, where it is not known how many of them are resident); live bytes from the last full census, resident bytes from the newest. An estimate if the heap was sampled.",
    );
    for (_, labels, view) in &ranked.own {
        if let Some(ratio) = view.fragmentation_ratio {
            family.add(&labels.with(&[]), ratio);
        }
    }
    family
}

fn resident(ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(
        "fragprof_process_resident_bytes",
        "Resident bytes of the process at the last scan of the process list; the kernel's figure, off by up to some hundred KiB per CPU.",
    );
    for (process, labels, _) in &ranked.own {
        family.add(&labels.with(&[]), process.rss_bytes as f64);
    }
    if !ranked.other.is_empty() {
        let sum = ranked.other.iter().map(|process| process.rss_bytes).fold(0, u64::saturating_add);
        family.add(&Labels::other().with(&[]), sum as f64);
    }
    family
}

fn not_malloc(ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(
        "fragprof_process_not_malloc_resident_bytes",
        "Resident bytes outside malloc, by kind of mapping, as of the last full census; shared pages count in each process. Kinds are determined by the owner's data or the mappings' names and order: an unnamed mapping of an unknown owner is other_anonymous.",
    );
    for (process, labels, _) in &ranked.own {
        for one in process.best().iter().flat_map(|taken| &taken.census.not_malloc) {
            family.add(&labels.with(&[("kind", one.kind)]), one.resident_bytes as f64);
        }
    }
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for one in ranked.other.iter().filter_map(|process| process.best()).flat_map(|taken| &taken.census.not_malloc) {
        let sum = sums.entry(one.kind).or_default();
        *sum = sum.saturating_add(one.resident_bytes);
    }
    for (kind, sum) in sums {
        family.add(&Labels::other().with(&[("kind", kind)]), sum as f64);
    }
    family
}

fn verdicts(ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(
        "fragprof_process_verdict",
        "1 for the current verdict, as of the last full census; 0 for the others. For pid=\"other\" the number of processes by verdict. /api/v1/processes/PID/explain has its numbers and confidence.",
    );
    let holds = |process: &ProcessSample, kind: Kind| process.verdict.as_ref().is_some_and(|verdict| verdict.verdict == kind);
    for (process, labels, _) in ranked.own.iter().filter(|(process, ..)| process.verdict.is_some()) {
        for kind in Kind::ALL {
            family.add(&labels.with(&[("verdict", kind.name())]), f64::from(u8::from(holds(process, kind))));
        }
    }
    for kind in Kind::ALL {
        let processes = ranked.other.iter().filter(|process| holds(process, kind)).count();
        if processes > 0 {
            family.add(&Labels::other().with(&[("verdict", kind.name())]), processes as f64);
        }
    }
    family
}

fn changes(ranked: &Ranked<'_>) -> [Family; 3] {
    let mut live = Family::gauge(
        "fragprof_process_live_growth_bytes_per_second",
        "Growth of the live bytes' low-water mark between the older and the newer half of the last 12 full censuses, without temporary allocations. Negative if it shrinks; no series before 4 censuses.",
    );
    let mut resident =
        Family::gauge("fragprof_process_resident_growth_bytes_per_second", "The same for the resident bytes of the process.");
    let mut reached = Family::gauge(
        "fragprof_process_memory_limit_reached_in_seconds",
        "Estimate: time until fragprof_cgroup_memory_limit_bytes is reached at the process's growth of resident bytes; no series unless it grows. Other processes of the cgroup are not included, so the limit may be reached sooner.",
    );
    for (_, labels, view) in &ranked.own {
        let labels = labels.with(&[]);
        if let Some(growth) = view.growth {
            live.add(&labels, growth.live_bytes_per_s);
            resident.add(&labels, growth.resident_bytes_per_s);
        }
        if let Some(seconds) = view.memory_limit.as_ref().and_then(|limit| limit.seconds_to_limit_est) {
            reached.add(&labels, seconds);
        }
    }
    [live, resident, reached]
}

fn attributed(ranked: &Ranked<'_>) -> Family {
    let mut family = Family::gauge(
        "fragprof_attributed_ratio",
        "Share of the live heap, as of the last full census, that has a call stack, by the tier that knows it (mode); at most 1. An estimate unless the mode is exact; the rest was allocated before the tier began, or is unattributed. No series if no tier knows live bytes by stack.",
    );
    for (process, labels, _) in &ranked.own {
        let live_bytes = process.heaps.iter().filter_map(|heap| heap.ladder.live_bytes).fold(0, u64::saturating_add);
        if let Some((known_bytes, mode)) = process.attributed.live_bytes().filter(|_| live_bytes > 0) {
            family.add(&labels.with(&[("mode", mode.name())]), (known_bytes as f64 / live_bytes as f64).min(1.0));
        }
    }
    family
}

fn rates(ranked: &Ranked<'_>) -> [Family; 8] {
    let mut calls = Family::gauge(
        "fragprof_process_allocations_per_second",
        "Allocations per second, by the tier that measured it (mode): exact = counted, sampled and governed = estimated, with the error in fragprof_process_allocations_per_second_stderr. No series if no tier measures it.",
    );
    let mut calls_error =
        Family::gauge("fragprof_process_allocations_per_second_stderr", "Standard error of fragprof_process_allocations_per_second.");
    let mut bytes = Family::gauge(
        "fragprof_process_allocated_bytes_per_second",
        "Bytes requested per second, by the tier that measured it (mode), with the error in fragprof_process_allocated_bytes_per_second_stderr.",
    );
    let mut bytes_error = Family::gauge(
        "fragprof_process_allocated_bytes_per_second_stderr",
        "Standard error of fragprof_process_allocated_bytes_per_second.",
    );
    let mut calls_min = Family::gauge(
        "fragprof_process_allocations_per_second_min",
        "Lower bound of the allocations per second, right in 95 of 100 cases; replaces fragprof_process_allocations_per_second for a process that spends more than half of its windows in probes.",
    );
    let mut bytes_min = Family::gauge(
        "fragprof_process_allocated_bytes_per_second_min",
        "Lower bound of the bytes requested per second; likewise replaces fragprof_process_allocated_bytes_per_second.",
    );
    let mut slowdown = Family::gauge(
        "fragprof_process_slowdown_ratio",
        "Deprecated, removed in the next release: fragprof_process_slowdown_ratio_est, with the tier (mode).",
    );
    let mut flags = Family::gauge(
        "fragprof_process_retention_flags",
        "Stacks flagged as keeping what they allocate, by survivors of windows that were checked again. A stack without a flag may keep its blocks too. No series if none is checked.",
    );
    for (_, labels, view) in &ranked.own {
        if let Some(rates) = &view.rates {
            let labels = labels.with(&[("mode", &rates.mode)]);
            for (family, value) in [
                (&mut calls, rates.allocations_per_s),
                (&mut calls_error, rates.allocations_per_s_stderr),
                (&mut calls_min, rates.allocations_per_s_min),
                (&mut bytes, rates.allocated_bytes_per_s),
                (&mut bytes_error, rates.allocated_bytes_per_s_stderr),
                (&mut bytes_min, rates.allocated_bytes_per_s_min),
            ] {
                if let Some(value) = value {
                    family.add(&labels, value);
                }
            }
        }
        for profile in &view.profiles {
            if let Some(ratio) = profile.slowdown_ratio_est {
                slowdown.add(&labels.with(&[("mode", &profile.mode)]), ratio);
            }
            if let Some(count) = profile.retention_flags {
                flags.add(&labels.with(&[]), count as f64);
            }
        }
    }
    [calls, calls_error, calls_min, bytes, bytes_error, bytes_min, slowdown, flags]
}

/// Name, help and source.
type MemoryFigure = (&'static str, &'static str, fn(&CgroupMemory) -> Option<u64>);

/// Figures of a process's cgroup. `{pid, comm, namespace, pod, container}` each.
const CGROUP: [MemoryFigure; 3] = [
    (
        "fragprof_cgroup_memory_limit_bytes",
        "Memory limit of the process's container, or of its cgroup outside containers: the lowest of the cgroup's and its ancestors'. No series without a limit. The same for each process of a container: take max by (namespace, pod, container).",
        |memory| memory.limit_bytes,
    ),
    (
        "fragprof_cgroup_memory_usage_bytes",
        "Memory that counts towards the limit, page cache included, of the process's container or cgroup. The same for each process of a container.",
        |memory| Some(memory.usage_bytes),
    ),
    (
        "fragprof_cgroup_memory_working_set_bytes",
        "The usage without inactive file pages, of the process's container or cgroup: what a kubelet compares with the limit. The same for each process of a container.",
        |memory| Some(memory.working_set_bytes),
    ),
];

/// The containers of the processes with series of their own, and the memory of their cgroups.
fn containers(ranked: &Ranked<'_>) -> Vec<Family> {
    let mut info = Family::gauge(
        "fragprof_process_container_info",
        "1 for each process in a container, with its ids and image. Without names from a container runtime (fragprof_cri_up is not 1) pod is the pod's uid, and container the first digits of the id.",
    );
    let mut oom_kills = Family::counter(
        "fragprof_cgroup_oom_kills_total",
        "Processes that the kernel killed in the process's container or cgroup because memory ran out, since it was created. The same for each process of a container.",
    );
    let mut families: Vec<Family> = CGROUP.iter().map(|&(name, help, _)| Family::gauge(name, help)).collect();
    for (process, labels, _) in &ranked.own {
        if let Some(container) = &process.surroundings.container {
            let id = container.id.as_ref().map_or("", |id| id.as_str());
            let image = container.image.as_deref().unwrap_or_default();
            info.add(&labels.with(&[("container_id", id), ("engine", container.engine.name()), ("image", image)]), 1.0);
        }
        let Some(memory) = &process.surroundings.memory else { continue };
        for (family, (_, _, figure)) in families.iter_mut().zip(&CGROUP) {
            if let Some(value) = figure(memory) {
                family.add(&labels.with(&[]), value as f64);
            }
        }
        oom_kills.add(&labels.with(&[]), memory.oom_kills as f64);
    }
    families.extend([oom_kills, info]);
    families
}

/// What the processes with series of their own belong to, to be joined by `instance` and `pid`.
fn workloads(ranked: &Ranked<'_>) -> Family {
    let mut info = Family::gauge(
        "fragprof_process_workload_info",
        "1 for each process, with the workload that it belongs to and its service and version. Join it by (instance, pid).",
    );
    for (process, labels, _) in &ranked.own {
        let own: Vec<&str> = labels.with(&[]).iter().map(|(name, _)| *name).collect();
        let more: Vec<_> = process.workload.labels().into_iter().filter(|(name, _)| !own.contains(name)).collect();
        info.add(&labels.with(&more), 1.0);
    }
    info
}

fn censuses(ranked: &Ranked<'_>, now: Instant) -> [Family; 3] {
    let mut age = Family::gauge(
        "fragprof_census_age_seconds",
        "Time since the last census of the level: the age of the figures. For pid=\"other\" that of the oldest.",
    );
    let mut duration = Family::gauge(
        "fragprof_census_duration_seconds",
        "Wall time of the last census of the level, pauses included: a heap under load may have changed meanwhile.",
    );
    let mut usable = Family::gauge(
        "fragprof_census_usable",
        "1 if the last full or sampled census is usable for verdicts: balanced, and at most 1 % unknown. For pid=\"other\" 1 if all are.",
    );
    for (process, labels, _) in &ranked.own {
        for taken in [&process.top, &process.full].into_iter().flatten() {
            let of_level = labels.with(&[("level", taken.census.level.name())]);
            age.add(&of_level, taken.age_s(now));
            duration.add(&of_level, taken.census.walk.duration_ms / 1e3);
        }
        if let Some(full) = &process.full {
            usable.add(&labels.with(&[]), f64::from(u8::from(full.census.walk.usable)));
        }
    }
    let mut oldest: BTreeMap<&str, f64> = BTreeMap::new();
    for taken in ranked.other.iter().flat_map(|process| [&process.top, &process.full]).flatten() {
        let most = oldest.entry(taken.census.level.name()).or_default();
        *most = most.max(taken.age_s(now));
    }
    for (level, age_s) in oldest {
        age.add(&Labels::other().with(&[("level", level)]), age_s);
    }
    let mut others = ranked.other.iter().filter_map(|process| process.full.as_ref()).map(|full| full.census.walk.usable).peekable();
    if others.peek().is_some() {
        usable.add(&Labels::other().with(&[]), f64::from(u8::from(others.all(|one| one))));
    }
    [age, duration, usable]
}
