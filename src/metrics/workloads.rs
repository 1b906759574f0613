//! The node's workloads: a small set of series whose number does not grow with processes, pods and containers, for a whole fleet of nodes.
//!
//! Bounded by the number of series: the workloads with the most resident memory have series of their own, as many as fit; the rest is summed
//! in `workload="other"`. A workload has all of its series or none, so sums over a fleet are complete. Each exposition is made from the newest
//! snapshot: what has no process any more has no series, except that kills for lack of memory stay for an hour.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::family::Family;
use crate::fragmentation::verdict::Kind;
use crate::model::sample::{HeapSample, ProcessSample};
use crate::model::snapshot::Snapshot;
use crate::process::workload::Workload;

/// The labels of the sum of the workloads without series of their own.
const OTHER: [(&str, &str); 3] = [("workload_kind", "other"), ("workload", "other"), ("service_name", "other")];
/// Most series of that sum: the ladder, two rates, the limit, kills, and processes by verdict with those that have none yet.
const OTHER_SERIES_MAX: usize = 5 + 4 + Kind::ALL.len() + 1;
/// The value of `verdict` for processes without one.
const NO_VERDICT: &str = "none";

/// Bytes of a step, added over the heaps in which it is known.
type Step = fn(&HeapSample) -> Option<u64>;

/// Name, help and source of the ladder's steps.
const LADDER: [(&str, &str, Step); 5] = [
    ("fragprof_workload_extent_bytes", "Address space that the allocators of the workload's processes on this node hold.", |heap| {
        Some(heap.ladder.extent_bytes)
    }),
    ("fragprof_workload_resident_bytes", "Part of the extent that is in RAM.", |heap| Some(heap.ladder.resident_bytes)),
    (
        "fragprof_workload_live_bytes",
        "Chunks in use, counted, or estimated in heaps too large to be walked. Without processes that have had no full or sampled census yet.",
        HeapSample::live,
    ),
    (
        "fragprof_workload_pinned_bytes",
        "Free bytes on resident pages that also hold live bytes: no trim releases them. Without processes that have had no full or sampled census yet.",
        |heap| heap.ladder.pinned_bytes,
    ),
    (
        "fragprof_workload_trimmable_bytes",
        "What malloc_trim(0), or a purge, would release: a prediction. Without processes that have had no full or sampled census yet.",
        |heap| heap.ladder.trimmable_bytes,
    ),
];

/// The figures of one workload, or of several.
#[derive(Debug, Default)]
struct Sum {
    ladder: [Option<u64>; LADDER.len()],
    allocated_bytes_per_s: Option<f64>,
    slowdown_ratio: Option<f64>,
    limit_bytes: Option<u64>,
    oom_kills: Option<u64>,
    processes: BTreeMap<&'static str, u64>,
}

/// Adds what is known.
fn add<T: std::ops::Add<Output = T>>(sum: &mut Option<T>, more: Option<T>) {
    *sum = match (sum.take(), more) {
        (Some(one), Some(other)) => Some(one + other),
        (one, other) => one.or(other),
    };
}

impl Sum {
    fn add_process(&mut self, process: &ProcessSample) {
        for heap in &process.heaps {
            for (sum, (_, _, step)) in self.ladder.iter_mut().zip(&LADDER) {
                add(sum, step(heap));
            }
        }
        let rates = process.attributed.rates().filter(|(rates, _)| !rates.are_lower_bounds);
        add(&mut self.allocated_bytes_per_s, rates.map(|(rates, _)| rates.allocated_bytes_per_s));
        for lost in process.attributed.all().filter_map(|one| one.slowdown_ratio_est) {
            self.slowdown_ratio = Some(self.slowdown_ratio.map_or(lost, |most| most.max(lost)));
        }
        let verdict = process.verdict.as_ref().map_or(NO_VERDICT, |verdict| verdict.verdict.name());
        *self.processes.entry(verdict).or_default() += 1;
    }

    fn merge(&mut self, other: &Self) {
        self.ladder.iter_mut().zip(other.ladder).for_each(|(sum, more)| add(sum, more));
        add(&mut self.allocated_bytes_per_s, other.allocated_bytes_per_s);
        self.slowdown_ratio = match (self.slowdown_ratio, other.slowdown_ratio) {
            (Some(one), Some(other)) => Some(one.max(other)),
            (one, other) => one.or(other),
        };
        add(&mut self.limit_bytes, other.limit_bytes);
        add(&mut self.oom_kills, other.oom_kills);
        for (&verdict, count) in &other.processes {
            *self.processes.entry(verdict).or_default() += count;
        }
    }

    fn resident_bytes(&self) -> u64 {
        self.ladder.get(1).copied().flatten().unwrap_or(0)
    }

    fn series(&self) -> usize {
        let rates = [self.allocated_bytes_per_s.is_some(), self.slowdown_ratio.is_some()];
        let limits = [self.limit_bytes.is_some(), self.oom_kills.is_some()];
        let figures = self.ladder.iter().map(Option::is_some).chain(rates).chain(limits);
        figures.filter(|is_known| *is_known).count() + self.processes.len()
    }
}

/// The figures of each workload, those with the most resident memory first.
fn sums(snapshot: &Snapshot) -> Vec<(&Workload, Sum)> {
    let mut sums: BTreeMap<&Workload, Sum> = BTreeMap::new();
    let mut limited = BTreeSet::new();
    for process in &snapshot.processes {
        let sum = sums.entry(&process.workload).or_default();
        sum.add_process(process);
        // All processes of a container have the same limit.
        let surroundings = &process.surroundings;
        let limit = surroundings.memory.and_then(|memory| memory.limit_bytes);
        let container = surroundings.container.as_ref().and_then(|container| container.id.as_ref());
        let cgroup = container.is_none().then_some(&surroundings.cgroup);
        if limit.is_some() && limited.insert((&process.workload, container, cgroup)) {
            add(&mut sum.limit_bytes, limit);
        }
    }
    for (workload, kills) in snapshot.workload_kills.iter() {
        sums.entry(workload).or_default().oom_kills = Some(*kills);
    }
    let mut sums: Vec<_> = sums.into_iter().collect();
    // The sort is stable: equal ones stay in the order of their names.
    sums.sort_by_key(|(_, sum)| Reverse(sum.resident_bytes()));
    sums
}

/// How many of these have series of their own.
fn own(sums: &[(&Workload, Sum)], series_max: usize) -> usize {
    if sums.iter().map(|(_, sum)| sum.series()).sum::<usize>() <= series_max {
        return sums.len();
    }
    let mut left = series_max.saturating_sub(OTHER_SERIES_MAX);
    let fits = |(_, sum): &&(&Workload, Sum)| {
        let rest = left.checked_sub(sum.series());
        left = rest.unwrap_or(0);
        rest.is_some()
    };
    sums.iter().take_while(fits).count()
}

/// The families.
#[must_use]
pub fn families(snapshot: &Snapshot) -> Vec<Family> {
    let sums = sums(snapshot);
    let (own, others) = sums.split_at(own(&sums, snapshot.metrics_workload_series_max));
    let mut rest = Sum::default();
    others.iter().for_each(|(_, sum)| rest.merge(sum));
    let mut rows: Vec<(Vec<(&str, &str)>, &Sum)> = own.iter().map(|(workload, sum)| (workload.labels(), sum)).collect();
    if !others.is_empty() {
        rows.push((OTHER.to_vec(), &rest));
    }
    let mut ladder = LADDER.map(|(name, help, _)| Family::gauge(name, help));
    let mut allocated = Family::gauge(
        "fragprof_workload_allocated_bytes_per_second",
        "Bytes requested per second, summed over the workload's processes for which a tier measures it; without lower bounds.",
    );
    let mut slowdown = Family::gauge(
        "fragprof_workload_slowdown_ratio_est",
        "Largest estimated share of its running time that one of the workload's processes loses to probes.",
    );
    let mut limit = Family::gauge(
        "fragprof_workload_memory_limit_bytes",
        "Sum of the memory limits of the workload's containers or cgroups that have one.",
    );
    let mut kills = Family::counter(
        "fragprof_workload_oom_kills_total",
        "Watched processes of the workload that the kernel killed for lack of memory since the agent's start. No series before the first one, nor an hour after the last one.",
    );
    let mut processes = Family::gauge(
        "fragprof_workload_processes",
        "Watched processes of the workload, by their current verdict; none: no full or sampled census yet.",
    );
    for (labels, sum) in &rows {
        for (family, bytes) in ladder.iter_mut().zip(sum.ladder) {
            bytes.into_iter().for_each(|bytes| family.add(labels, bytes as f64));
        }
        sum.allocated_bytes_per_s.into_iter().for_each(|rate| allocated.add(labels, rate));
        sum.slowdown_ratio.into_iter().for_each(|ratio| slowdown.add(labels, ratio));
        sum.limit_bytes.into_iter().for_each(|bytes| limit.add(labels, bytes as f64));
        sum.oom_kills.into_iter().for_each(|count| kills.add(labels, count as f64));
        for (verdict, count) in &sum.processes {
            processes.add(&labels.iter().copied().chain([("verdict", *verdict)]).collect::<Vec<_>>(), *count as f64);
        }
    }
    let counts = Family::gauge(
        "fragprof_agent_workloads",
        "Workloads on the node: with series of their own, or summed in workload=\"other\" (metrics.workload_series_max).",
    )
    .with_each("series", [("own", own.len() as f64), ("other", others.len() as f64)]);
    ladder.into_iter().chain([allocated, slowdown, limit, kills, processes, counts]).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::time::{Instant, SystemTime};

    use super::*;
    use crate::heap::ladder::Ladder;
    use crate::model::attribution::{Attributed, Attributions, Rates};
    use crate::model::sample::Identity;
    use crate::process::ProcessId;
    use crate::process::container::{CgroupMemory, Container, ContainerId};
    use crate::process::workload::Kind as WorkloadKind;
    use crate::profile::Profile;
    use crate::units::Pid;

    fn workload(number: u32) -> Arc<Workload> {
        Arc::new(Workload {
            namespace: Some("shop".into()),
            kind: WorkloadKind::Deployment,
            name: format!("web-{number}"),
            service_name: format!("web-{number}"),
            service_version: Some("1.0".into()),
        })
    }

    /// Process `pid` of a workload: its heap has `pid` MiB, its container a limit of 1 GiB.
    fn process(pid: u32, workload: Arc<Workload>) -> ProcessSample {
        let process = ProcessId { pid: Pid(pid), start_ticks: 1 };
        let mut sample = ProcessSample::new(Identity { process, stack: 1 }, "web".into(), 0, 0);
        let bytes = u64::from(pid) << 20;
        let ladder = Ladder {
            extent_bytes: 2 * bytes,
            resident_bytes: bytes,
            live_bytes: Some(bytes / 2),
            trimmable_bytes: Some(bytes / 4),
            pinned_bytes: Some(bytes / 8),
            ..Ladder::default()
        };
        sample.heaps = vec![HeapSample { allocator: "glibc".into(), ladder, ..HeapSample::default() }];
        sample.surroundings.memory = Some(CgroupMemory { limit_bytes: Some(1 << 30), ..CgroupMemory::default() });
        let id = ContainerId::new(&format!("{:064x}", pid / 2));
        sample.surroundings.container = Some(Arc::new(Container { id, ..Container::default() }));
        sample.workload = workload;
        sample
    }

    fn text(processes: Vec<ProcessSample>, series_max: usize) -> String {
        let snapshot = Snapshot {
            processes: processes.into_iter().map(Arc::new).collect(),
            metrics_workload_series_max: series_max,
            workload_kills: Arc::new([(workload(1), 2)].into()),
            ..Snapshot::empty(Instant::now())
        };
        super::super::text(families(&snapshot)).unwrap()
    }

    fn series<'a>(text: &'a str, family: &str) -> Vec<&'a str> {
        text.lines().filter(|line| line.starts_with(family) && !line.starts_with('#')).collect()
    }

    /// The sum of a family over all workloads.
    fn sum(text: &str, family: &str) -> f64 {
        series(text, &format!("{family}{{")).iter().map(|line| line.rsplit_once(' ').unwrap().1.parse::<f64>().unwrap()).sum()
    }

    #[test]
    fn replicas_are_summed_and_a_container_s_limit_counts_once() {
        let text = text(vec![process(2, workload(1)), process(3, workload(1)), process(4, workload(1)), process(9, workload(2))], 300);
        let labels = "namespace=\"shop\",workload_kind=\"deployment\",workload=\"web-1\",service_name=\"web-1\",service_version=\"1.0\"";
        for (family, value) in
            [("resident_bytes", 9 << 20), ("extent_bytes", 18 << 20), ("memory_limit_bytes", 2_u64 << 30), ("oom_kills_total", 2)]
        {
            assert!(text.contains(&format!("fragprof_workload_{family}{{{labels}}} {value}\n")), "{family}: {text}");
        }
        assert!(text.contains(&format!("fragprof_workload_processes{{{labels},verdict=\"none\"}} 3\n")), "{text}");
        assert!(!text.contains("workload_kind=\"other\""));
    }

    #[test]
    fn fifty_workloads_have_at_most_three_hundred_series_and_nothing_is_lost() {
        let board = Attributions::default();
        let attributed = || Attributed {
            profile: Arc::new(Profile::default()),
            at: Instant::now(),
            wall: SystemTime::now(),
            blocks: None,
            rates: Some(Rates { allocated_bytes_per_s: 10.0, ..Rates::default() }),
            slowdown_ratio_est: Some(0.01),
        };
        // Everything is known of every process, and each workload has two versions of three replicas: nothing else has more series.
        for workloads in [50, 1000] {
            let mut processes = Vec::new();
            for pid in 1..=workloads * 6 {
                let mut version = (*workload(pid % workloads)).clone();
                version.service_version = Some(format!("1.{}", pid % 2));
                let mut one = process(pid, Arc::new(version));
                board.publish(one.identity.process, attributed());
                one.attributed = board.of(one.identity.process);
                processes.push(one);
            }
            let wanted: u64 = processes.iter().map(|one| one.heaps[0].ladder.resident_bytes).sum();
            let text = text(processes, 300);
            let count = series(&text, "fragprof_workload_").len();
            assert!((250..=300).contains(&count), "{count} series for {workloads} workloads");
            assert_eq!(sum(&text, "fragprof_workload_resident_bytes"), wanted as f64);
            assert_eq!(sum(&text, "fragprof_workload_processes"), f64::from(workloads * 6));
            assert!(text.contains("fragprof_workload_resident_bytes{workload_kind=\"other\",workload=\"other\",service_name=\"other\"}"));
        }
        // Fifty healthy workloads without limits all have series of their own.
        let plain = |pid| {
            let mut one = process(pid, workload(pid % 50));
            one.surroundings = Default::default();
            one
        };
        let text = text((100..300).map(plain).collect(), 301);
        assert!(!text.contains("workload_kind=\"other\"") && text.contains("fragprof_agent_workloads{series=\"own\"} 50\n"), "{text}");
    }

    #[test]
    fn the_smallest_workloads_are_in_other() {
        let text = text((1..=100).map(|pid| process(pid, workload(pid))).collect(), 60);
        let shown = series(&text, "fragprof_workload_resident_bytes");
        assert!(shown[0].contains("web-100") && shown.last().unwrap().contains("other"), "{shown:?}");
        assert!(series(&text, "fragprof_workload_").len() <= 60);
        assert_eq!(sum(&text, "fragprof_workload_oom_kills_total"), 2.0);
    }
}
