//! Coverage: which share of the live heap has a stack, and what the profile may have missed. Pure.

use serde::Serialize;

use super::kind::{ValueKind, Values};
use super::meta::{Mode, Process, UNOBSERVED_MS, UNOBSERVED_SPELLS, UNWATCHED_CHILDREN};
use super::model::{BEFORE_ATTACH, Profile, UNATTRIBUTED};
use super::page::percent_floor;
use crate::units::{HumanBytes, grouped};

/// The share of the live heap that has a stack, and what may be missing. Bytes of chunks, with the allocator's rounding.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct Coverage {
    /// Live bytes of the heaps by the census at the end. `None` = no census of any process.
    pub live_bytes: Option<u64>,
    /// The part of them that has a stack. `None` = `live_bytes` is not known.
    pub attributed_bytes: Option<u64>,
    /// The part from before the recording, as far as it could be distinguished from the rest.
    pub before_attach_bytes: u64,
    /// The part without a stack.
    pub unattributed_bytes: u64,
    /// Live bytes by the census nearest to the peak of the recorded live bytes, of the processes without a census at the end. `None` = there
    /// are no such processes, or it is not known.
    pub live_at_peak_bytes: Option<u64>,
    /// Recorded live bytes shortly before that census, as they were requested: without the allocator's rounding.
    pub recorded_at_peak_bytes: Option<u64>,
    /// Whether the parts are estimates.
    pub is_estimate: bool,
    /// Whether a command was recorded from its start: all of its allocations have a stack but those that are counted as lost.
    #[serde(default)]
    pub is_from_start: bool,
    /// Processes with a census of their live bytes: the parts are those of these processes.
    pub processes_known: u64,
    /// Processes of the profile.
    pub processes: u64,
    /// Live bytes that may have been freed, because records were lost.
    pub doubtful_bytes: u64,
    /// Time in which a process ran without its probes, in microseconds, summed over the processes.
    pub unobserved_us: u64,
    /// Number of these processes.
    pub processes_unobserved: u64,
    /// Children that could not be watched: the profile contains nothing of them.
    pub children_unwatched: u64,
    /// Share of the time in which every call was traced, in a recording under a budget. `None` = there were no windows.
    pub traced_ratio: Option<f64>,
    /// Lost events, of any kind.
    pub lost: u64,
}

/// Losses that have phrases of their own, and are not added to the others.
const TOLD_APART: [&str; 3] = [UNOBSERVED_SPELLS, UNOBSERVED_MS, UNWATCHED_CHILDREN];

/// Kinds that give live bytes by stack if no census was joined block by block.
const PARTS: [ValueKind; 3] = [ValueKind::InuseSpace, ValueKind::LargeSpace, ValueKind::ConfirmedSpace];

impl Coverage {
    /// The coverage of a profile.
    #[must_use]
    pub fn of(profile: &Profile) -> Self {
        let meta = &profile.meta;
        let losses = |name: &str| meta.losses.iter().filter(|loss| loss.name == name).map(|loss| loss.value).fold(0, u64::saturating_add);
        let mut coverage = Self {
            is_estimate: meta.mode == Mode::Sampled,
            is_from_start: meta.is_from_start,
            processes: meta.processes.len() as u64,
            doubtful_bytes: profile.totals().get(ValueKind::DoubtfulSpace),
            traced_ratio: traced_ratio(profile),
            children_unwatched: losses(UNWATCHED_CHILDREN),
            lost: (meta.losses.iter().filter(|loss| !TOLD_APART.contains(&loss.name.as_str())))
                .map(|loss| loss.value)
                .fold(0, u64::saturating_add),
            ..Self::default()
        };
        for process in &meta.processes {
            coverage.add(profile, process);
        }
        coverage
    }

    fn add(&mut self, profile: &Profile, process: &Process) {
        let unobserved_us = process.unobserved_us.unwrap_or(0);
        self.unobserved_us = self.unobserved_us.saturating_add(unobserved_us);
        self.processes_unobserved += u64::from(unobserved_us > 0);
        // Where no census can read the heap, an exact recording knows its own blocks alone: all there is if it began with the process.
        let is_of_records = profile.meta.mode == Mode::Exact && process.attribution.is_none();
        if is_of_records && !self.is_from_start {
            return self.add_peak(process);
        }
        let (owned, before, live) = match process.attribution {
            Some(of) => {
                let live = of.attributed_bytes.saturating_add(of.before_attach_bytes).saturating_add(of.unattributed_bytes);
                (of.attributed_bytes, of.before_attach_bytes, live)
            }
            None => match process.heap.and_then(|heap| heap.live_bytes) {
                Some(live) => {
                    let (owned, before) = owned_by_stacks(profile, process.pid);
                    // Blocks that were freed between the last record and the census.
                    let owned = owned.min(live);
                    (owned, before.min(live - owned), live)
                }
                None => return self.add_peak(process),
            },
        };
        self.processes_known += 1;
        sum(&mut self.live_bytes, live);
        sum(&mut self.attributed_bytes, owned);
        self.before_attach_bytes = self.before_attach_bytes.saturating_add(before);
        self.unattributed_bytes = self.unattributed_bytes.saturating_add(live - owned - before);
    }

    fn add_peak(&mut self, process: &Process) {
        let Some(peak) = process.at_peak else { return };
        if let Some(live) = peak.heap.live_bytes.filter(|&live| live > 0) {
            sum(&mut self.live_at_peak_bytes, live);
            sum(&mut self.recorded_at_peak_bytes, peak.recorded_live_bytes);
        }
    }

    /// Share of the live heap that has a stack, in 0..=1. `None` = not known, or nothing is live.
    #[must_use]
    pub fn attributed_ratio(&self) -> Option<f64> {
        let (owned, live) = (self.attributed_bytes?, self.live_bytes?);
        (live > 0).then(|| owned as f64 / live as f64)
    }

    /// One sentence: the share with a stack, and what may be missing.
    #[must_use]
    pub fn words(&self) -> String {
        format!("{}; {}", self.explained(), self.at_risk())
    }

    fn explained(&self) -> String {
        let (Some(live), Some(owned)) = (self.live_bytes, self.attributed_bytes) else {
            return self.explained_at_peak();
        };
        let Some(ratio) = self.attributed_ratio() else { return "nothing is live in the heap".to_owned() };
        if owned == 0 && self.traced_ratio.is_some_and(|ratio| ratio < 1.0) {
            return format!("live bytes have no stacks ({} by the census): windows measure rates and survivors", HumanBytes(live));
        }
        let about = if self.is_estimate { "about " } else { "" };
        let mut text =
            format!("{about}{}% of the live heap has a stack ({} of {}", percent_floor(ratio), HumanBytes(owned), HumanBytes(live));
        for (bytes, whose) in [(self.before_attach_bytes, "from before the recording"), (self.unattributed_bytes, "unattributed")] {
            if bytes > 0 {
                text.push_str(&format!(", {} {whose}", HumanBytes(bytes)));
            }
        }
        text.push(')');
        if self.processes_known < self.processes {
            text.push_str(&format!(", of {} of {} processes", self.processes_known, self.processes));
        }
        text
    }

    fn explained_at_peak(&self) -> String {
        let at_end = match self.is_from_start {
            true => "recorded from the start of the command, which ended without a census of its heap",
            false => "the share of the live heap that has a stack is not known: there was no census at the end",
        };
        // The two are of two moments and in two units: their ratio would say nothing.
        match (self.recorded_at_peak_bytes, self.live_at_peak_bytes) {
            (Some(recorded), Some(live)) if !self.is_from_start => format!(
                "{at_end}; the census nearest to the peak found {} live, and {} had been requested and recorded shortly before",
                HumanBytes(live),
                HumanBytes(recorded)
            ),
            _ => at_end.to_owned(),
        }
    }

    fn at_risk(&self) -> String {
        let mut risks = Vec::new();
        if self.doubtful_bytes > 0 {
            risks.push(format!("{} that may have been freed", HumanBytes(self.doubtful_bytes)));
        }
        if self.unobserved_us > 0 {
            let spell = self.unobserved_us as f64 / 1e6;
            let of = if self.processes > 1 { format!(" of {} processes", self.processes_unobserved) } else { String::new() };
            risks.push(format!("allocations and frees during {spell:.3} s{of} without probes"));
        }
        if self.children_unwatched > 0 {
            let children = if self.children_unwatched == 1 { "child" } else { "children" };
            risks.push(format!("everything in {} {children} that could not be watched", grouped(self.children_unwatched)));
        }
        if self.lost > 0 {
            risks.push(format!("{} counted under losses", grouped(self.lost)));
        }
        if let Some(ratio) = self.traced_ratio.filter(|&ratio| ratio < 1.0) {
            risks.push(format!(
                "the {}% of the time in which not every call was traced, for which the values are estimates",
                percent_floor(1.0 - ratio)
            ));
        }
        if risks.is_empty() { "nothing is known to be missed".to_owned() } else { format!("at risk: {}", risks.join(", ")) }
    }
}

/// Time of windows and full traces as a share of the time that their processes were watched; `None` if there was no window.
fn traced_ratio(profile: &Profile) -> Option<f64> {
    let meta = &profile.meta;
    if meta.governed.iter().all(|governed| governed.windows.values().all(|&count| count == 0)) {
        return None;
    }
    let traced_s: f64 = meta.governed.iter().map(|governed| governed.open_s + governed.full_s).sum();
    let watched_s = meta.duration_s * meta.governed.len() as f64;
    (watched_s > 0.0).then(|| (traced_s / watched_s).clamp(0.0, 1.0))
}

fn sum(total: &mut Option<u64>, part: u64) {
    *total = Some(total.unwrap_or(0).saturating_add(part));
}

/// Live bytes of a process with a stack, and those from before the recording, by the kind that covers most of them.
fn owned_by_stacks(profile: &Profile, pid: u32) -> (u64, u64) {
    let mut owned = Values::default();
    let mut before = Values::default();
    for stack in profile.stacks().iter().filter(|stack| stack.pid == pid) {
        match profile.rest_of(stack) {
            Some(BEFORE_ATTACH) => before.add(&stack.values),
            Some(UNATTRIBUTED) => {}
            _ => owned.add(&stack.values),
        }
    }
    let measured = |kind: &ValueKind| profile.meta.kinds.contains(*kind);
    let best = match measured(&ValueKind::LiveSpace) {
        true => Some(ValueKind::LiveSpace),
        // Parts of the heap that overlap: the larger one explains more.
        false => PARTS.into_iter().filter(measured).max_by_key(|kind| owned.get(*kind)),
    };
    best.map_or((0, 0), |kind| (owned.get(kind), before.get(kind)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::profile::testing::frame;
    use crate::profile::{Attribution, Counter, Frame, HeapMoment, HeapSummary, KindSet, Metadata};

    fn heap(live_bytes: u64) -> HeapSummary {
        HeapSummary { live_bytes: Some(live_bytes), ..HeapSummary::default() }
    }

    fn of(mode: Mode, process: Process, rows: &[(&str, ValueKind, u64)]) -> Coverage {
        let kinds: KindSet = rows.iter().map(|(_, kind, _)| *kind).collect();
        let mut profile = Profile::new(Metadata { mode, kinds, processes: vec![process], ..Metadata::default() });
        for (name, kind, bytes) in rows {
            profile.add(7, &[Frame { module: "m".into(), ..frame(name, 1) }], None, &Values::default().with(*kind, *bytes));
        }
        Coverage::of(&profile)
    }

    #[test]
    fn an_exact_recording_states_the_share_with_a_stack_and_that_nothing_is_missed() {
        let attribution =
            Attribution { attributed_bytes: 600, before_attach_bytes: 300, unattributed_bytes: 100, ..Attribution::default() };
        let coverage = of(Mode::Exact, Process { pid: 7, attribution: Some(attribution), ..Process::default() }, &[]);
        assert_eq!(coverage.attributed_ratio(), Some(0.6));
        assert_eq!(
            coverage.words(),
            "60% of the live heap has a stack (600 B of 1000 B, 300 B from before the recording, 100 B unattributed); nothing is known to be \
             missed"
        );
    }

    #[test]
    fn parts_of_the_heap_that_windows_know_are_compared_with_the_census() {
        let process = || Process { pid: 7, heap: Some(heap(1000)), ..Process::default() };
        let rows = [("f", ValueKind::LargeSpace, 150), ("g", ValueKind::LargeSpace, 50), (UNATTRIBUTED, ValueKind::LargeSpace, 800)];
        let coverage = of(Mode::Governed, process(), &rows);
        assert_eq!((coverage.attributed_bytes, coverage.unattributed_bytes, coverage.live_bytes), (Some(200), 800, Some(1000)));
        let coverage = of(Mode::Governed, process(), &[("f", ValueKind::SurvivorSpace, 150)]);
        assert_eq!(coverage.attributed_ratio(), Some(0.0), "rates give no live bytes");
    }

    #[test]
    fn the_blocks_that_were_recorded_are_not_the_heap_where_no_census_reads_it() {
        let process = || Process { pid: 7, heap: Some(heap(1000)), ..Process::default() };
        let rows = [("f", ValueKind::InuseSpace, 1000)];
        let coverage = of(Mode::Exact, process(), &rows);
        assert_eq!((coverage.attributed_ratio(), coverage.live_bytes), (None, None));
        let from_start = Metadata { mode: Mode::Exact, is_from_start: true, processes: vec![process()], ..Metadata::default() };
        let mut profile = Profile::new(Metadata { kinds: KindSet::EMPTY.with(ValueKind::InuseSpace), ..from_start });
        profile.add(7, &[Frame { module: "m".into(), ..frame("f", 1) }], None, &Values::default().with(ValueKind::InuseSpace, 1000));
        assert_eq!(Coverage::of(&profile).attributed_ratio(), Some(1.0));
    }

    #[test]
    fn for_windows_it_states_the_share_of_the_time_they_covered() {
        let mut profile = Profile::new(Metadata { mode: Mode::Governed, duration_s: 10.0, ..Metadata::default() });
        profile.meta.processes.push(Process { pid: 7, heap: Some(heap(1000)), ..Process::default() });
        profile.meta.governed.push(crate::profile::Governed {
            pid: 7,
            open_s: 0.5,
            windows: [("20ms".to_owned(), 25)].into(),
            ..crate::profile::Governed::default()
        });
        let words = Coverage::of(&profile).words();
        assert!(words.starts_with("live bytes have no stacks (1000 B by the census)"), "{words}");
        assert!(words.contains("at risk: the 95% of the time in which not every call was traced"), "{words}");
    }

    #[test]
    fn without_a_census_the_share_is_unknown_and_not_zero() {
        let coverage = of(Mode::Exact, Process { pid: 7, ..Process::default() }, &[("f", ValueKind::InuseSpace, 5)]);
        assert_eq!(coverage.attributed_ratio(), None);
        assert!(coverage.words().starts_with("the share of the live heap that has a stack is not known"), "{}", coverage.words());
        let at_peak = Some(HeapMoment { after_ms: 5, recorded_live_bytes: 450, heap: heap(500) });
        let coverage = of(Mode::Exact, Process { pid: 7, at_peak, ..Process::default() }, &[]);
        assert_eq!(coverage.attributed_ratio(), None);
        let words = coverage.words();
        assert!(
            words.contains("nearest to the peak found 500 B live, and 450 B had been requested and recorded shortly before"),
            "{words}"
        );
        let from_start = Metadata { mode: Mode::Exact, is_from_start: true, ..Metadata::default() };
        let words = Coverage::of(&Profile::new(from_start)).words();
        assert_eq!(
            words,
            "recorded from the start of the command, which ended without a census of its heap; nothing is known to be missed"
        );
    }

    #[test]
    fn what_is_at_risk_is_given_in_bytes_and_in_time() {
        let process = Process { pid: 7, unobserved_us: Some(250_000), ..Process::default() };
        let mut profile = Profile::new(Metadata {
            kinds: KindSet::EMPTY.with(ValueKind::DoubtfulSpace),
            processes: vec![process],
            losses: vec![Counter::new("lost_frees", 3, ""), Counter::new(UNOBSERVED_MS, 250, ""), Counter::new(UNWATCHED_CHILDREN, 2, "")],
            ..Metadata::default()
        });
        profile.add(7, &[], None, &Values::default().with(ValueKind::DoubtfulSpace, 4096));
        let words = Coverage::of(&profile).words();
        for part in [
            "at risk: 4.00 KiB that may have been freed",
            "during 0.250 s without probes",
            "everything in 2 children that could not be watched",
            "3 counted under losses",
        ] {
            assert!(words.contains(part), "{part}: {words}");
        }
    }
}
