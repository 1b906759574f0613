//! The verdict on a profile: the heap at the end of a recording, its change since the start, and the stacks responsible. Pure.

use super::decide::of_heap;
use super::trend::Shape;
use super::verdict::{Change, Evidence, Finding, Kind, Remedy, Source, TrendSample, Verdict};
use crate::allocator::Allocator;
use crate::heap::ladder::Ladder;
use crate::profile::{BEFORE_ATTACH, Frame, HeapSummary, Mode, Process, Profile, Stack, UNATTRIBUTED, ValueKind, glue, text};
use crate::units::{HumanBytes, counted};

/// Stacks named in the remedies.
const STACKS_NAMED: usize = 3;
/// A trim that would release less is not listed.
const TRIM_BYTES_MIN: u64 = 1 << 20;
/// Smallest fall of live bytes from their peak to the end that makes their shape "comes and goes".
const SWING_BYTES_MIN: u64 = 1 << 20;

/// Judges the process of a profile with the largest heap; `None` if the profile names no process.
#[must_use]
pub fn judge(profile: &Profile) -> Option<(&Process, Verdict)> {
    let size = |process: &&Process| process.heap.and_then(|heap| heap.resident_bytes).or(process.peak_inuse_bytes).unwrap_or(0);
    let process = profile.meta.processes.iter().max_by_key(size)?;
    let mut unknowns = vec!["memory outside malloc: a profile does not have it, fragprof explain PID does".to_owned()];
    match profile.meta.processes.len() {
        1 => {}
        2 => unknowns.push("the smaller process of the profile: only the largest one is judged".into()),
        several => unknowns.push(format!("the {} smaller processes of the profile: only the largest one is judged", several - 1)),
    }
    if process.heap.is_none() {
        unknowns.push("the heap at the end: the process had ended, or could not be read".into());
    }
    let change = change(profile, process);
    unknowns.push(match change {
        None => "whether live bytes grew: there was no census at the start".into(),
        Some(_) => {
            "whether live bytes rose and fell between the start and the end, as a varying load, or a table that is filled and flushed, \
                    causes it: there were only these two samples"
                .into()
        }
    });
    unknowns.extend(profile.meta.doubts.iter().cloned());
    let heap = process.heap.unwrap_or_default();
    let ladder = Ladder { unknown_bytes: heap.unknown_bytes.or(Some(0)), ..heap.map(Option::unwrap_or_default) };
    let evidence = Evidence {
        rss_bytes: ladder.resident_bytes,
        fragmentation_ratio: heap.fragmentation_ratio(),
        free_resident_bytes: heap.free_resident_bytes(),
        ladder,
        change,
        ..Evidence::default()
    };
    let findings = of_heap(&evidence);
    let remedies = remedies(&by_title(profile), process, &findings, &heap);
    let sources = sources(profile, process);
    Some((process, Verdict::of(findings, evidence, remedies, unknowns, sources)))
}

fn sources(profile: &Profile, process: &Process) -> Vec<Source> {
    let mut sources = Vec::new();
    if process.heap.is_some() {
        sources.push(Source::new("heap, in use, trimmable, pinned", "census of the allocator's own metadata at the end of the recording"));
    }
    if process.at_start.is_some() && process.heap.is_some() {
        sources.push(Source::new("change", "difference from the census at the start"));
    }
    sources.push(Source::new("stacks", profile.meta.source_words(process)));
    let governed = profile.meta.governed.iter().find(|governed| governed.pid == process.pid);
    if let Some(large) = governed.and_then(|governed| governed.large_blocks.as_ref()).filter(|large| large.since_s.is_some()) {
        let from = crate::units::grouped(large.from_bytes);
        sources.push(Source::new(
            "stacks of large blocks",
            format!("every block of {from} bytes or more that was allocated since tracking began"),
        ));
    }
    sources
}

/// From the census at the start to the one at the end. If more of the recorded bytes were live at some time than at the end, live bytes do
/// not only rise.
fn change(profile: &Profile, process: &Process) -> Option<Change> {
    let (start, end) = (process.at_start?, process.heap?);
    let look = |at_s, heap: HeapSummary| {
        let (live_bytes, resident_bytes) = (heap.live_bytes?, heap.resident_bytes?);
        Some(TrendSample { at_s, live_bytes, resident_bytes, free_bytes: heap.free_resident_bytes(), outside_bytes: 0 })
    };
    let before = look(start.after_ms as f64 / 1e3, start.heap)?;
    let after = look(profile.meta.duration_s, end)?;
    let change = (after.at_s > before.at_s).then(|| Change::between(&before, &after))?;
    let fallen = fallen_bytes(profile, process, &after);
    let is_swing = fallen.saturating_mul(4) >= u64::try_from(change.live_bytes_delta).unwrap_or(0);
    match is_swing && fallen >= SWING_BYTES_MIN {
        true => Some(Change { live_shape: Shape::ComesAndGoes, live_swing_bytes: fallen, ..change }),
        false => Some(change),
    }
}

/// By how much live bytes had fallen from their recorded peak when the recording ended.
fn fallen_bytes(profile: &Profile, process: &Process, end: &TrendSample) -> u64 {
    let by_census = process.at_peak.and_then(|peak| peak.heap.live_bytes).map_or(0, |peak| peak.saturating_sub(end.live_bytes));
    let has_inuse = profile.meta.kinds.contains(ValueKind::InuseSpace);
    let of_process = profile.stacks().iter().filter(|stack| stack.pid == process.pid);
    let inuse: u64 = of_process.map(|stack| stack.values.get(ValueKind::InuseSpace)).fold(0, u64::saturating_add);
    let by_record = process.peak_inuse_bytes.filter(|_| has_inuse).map_or(0, |peak| peak.saturating_sub(inuse));
    by_census.max(by_record)
}

/// The call that releases whole free pages. Of several allocators the one that the program brings serves its malloc, not the C library's.
fn trim_by_name(allocators: &[String]) -> &'static str {
    let known = || allocators.iter().map(|name| Allocator::of_name(name).unwrap_or_default().row());
    let serving = known().find(|row| row.trim.is_some() && !row.gives_way).or_else(|| known().find(|row| row.gives_way));
    let none_named = if allocators.is_empty() { Allocator::Glibc } else { Allocator::Other };
    serving.unwrap_or_else(|| none_named.row()).trim_in_short
}

fn remedies(profile: &Profile, process: &Process, findings: &[Finding], heap: &HeapSummary) -> Vec<Remedy> {
    let mut list = Vec::new();
    for finding in findings {
        match finding.verdict {
            Kind::Leak | Kind::Growing => list.extend(of_leak(profile, process)),
            Kind::Fragmentation => list.extend(of_fragmentation(profile, process)),
            _ => {}
        }
    }
    let is_healthy = findings.iter().all(|finding| finding.verdict == Kind::Healthy);
    if let Some(trimmable) = heap.trimmable_bytes.filter(|&bytes| bytes >= TRIM_BYTES_MIN && !is_healthy) {
        list.push(Remedy {
            action: trim_by_name(&process.allocators).into(),
            predicted_bytes: Some(trimmable),
            at_most: false,
            basis: "whole free pages at the end of the recording".into(),
            setting: None,
        });
    }
    for (name, _, bytes) in largest(profile, process, ValueKind::BlockedSpace).into_iter().take(1) {
        if !is_healthy {
            list.push(Remedy {
                action: format!("let {name} allocate its long-lived blocks before the load, or in a pool of their own"),
                predicted_bytes: Some(bytes),
                at_most: true,
                basis: "whole free pages below its block at the end of a heap, which the allocator would return by itself if the block were freed".into(),
                setting: None,
            });
        }
    }
    list
}

/// Remedies for growth: the stacks that hold most, by the best value that the profile has.
fn of_leak(profile: &Profile, process: &Process) -> Vec<Remedy> {
    let remedies = |kind, blocks, what: &str| -> Vec<Remedy> {
        let remedy = |(name, stack, bytes): (String, &Stack, u64)| Remedy {
            action: format!("free what {name} keeps"),
            predicted_bytes: Some(bytes),
            at_most: true,
            basis: format!(
                "live at the end in {}{what}, allocated since the start{}",
                counted(stack.values.get(blocks), "block"),
                interval(stack, kind)
            ),
            setting: None,
        };
        largest(profile, process, kind).into_iter().map(remedy).collect()
    };
    let mut list = remedies(ValueKind::InuseSpace, ValueKind::InuseObjects, "");
    if list.is_empty() {
        list = remedies(ValueKind::LargeSpace, ValueKind::LargeObjects, " above 1 KiB");
        list.extend(survivors(profile, process, |name| format!("check what {name} keeps")));
    }
    list
}

/// Remedies for the pinned bytes of a process: the stacks that pin most by a profile that measured them. Empty if it did not.
#[must_use]
pub fn against_pinning(profile: &Profile, pid: u32) -> Vec<Remedy> {
    let process = profile.meta.processes.iter().find(|process| process.pid == pid);
    let measured = process.filter(|_| profile.meta.kinds.contains(ValueKind::PinnedSpace));
    measured.map_or_else(Vec::new, |process| of_fragmentation(&by_title(profile), process))
}

/// Remedies for fragmentation: the stacks that pin most, or, if that is not known, those whose blocks live long.
fn of_fragmentation(profile: &Profile, process: &Process) -> Vec<Remedy> {
    let remedy = |(name, stack, bytes): (String, &Stack, u64)| Remedy {
        action: format!("allocate the blocks of {name} early or from a pool of their own"),
        predicted_bytes: Some(bytes),
        at_most: true,
        basis: format!(
            "free bytes on the pages of its {} of live blocks: what would be saved if all of them were elsewhere",
            HumanBytes(stack.values.get(ValueKind::LiveSpace).max(stack.values.get(ValueKind::InuseSpace)))
        ),
        setting: None,
    };
    let list: Vec<Remedy> = largest(profile, process, ValueKind::PinnedSpace).into_iter().map(remedy).collect();
    match list.is_empty() {
        true => survivors(profile, process, |name| format!("check whether the blocks of {name} can come from a pool of their own")),
        false => list,
    }
}

/// The stacks whose blocks live long, from windows: an estimate of what was allocated, not of what is live.
fn survivors(profile: &Profile, process: &Process, action: impl Fn(&str) -> String) -> Vec<Remedy> {
    let Some(age_s) = profile.meta.survivor_age_s.filter(|_| profile.meta.mode == Mode::Governed) else { return Vec::new() };
    let remedy = |(name, stack, bytes): (String, &Stack, u64)| {
        let about = match profile.is_lower_bound(process.pid, ValueKind::SurvivorSpace) {
            true => format!("at least {} of its bytes outlived {age_s} s: a lower bound", HumanBytes(bytes)),
            false => format!(
                "about {} of its bytes outlived {age_s} s{}: an estimate",
                HumanBytes(bytes),
                interval(stack, ValueKind::SurvivorSpace)
            ),
        };
        Remedy {
            action: action(&name),
            predicted_bytes: None,
            at_most: false,
            basis: format!("{about} from windows, which do not show what is still live"),
            setting: None,
        }
    };
    largest(profile, process, ValueKind::SurvivorSpace).into_iter().map(remedy).collect()
}

/// The 95 % interval of a stack's value, if it is an estimate.
fn interval(stack: &Stack, kind: ValueKind) -> String {
    match stack.errors.get(kind) {
        0 => String::new(),
        error => format!(" ({})", text::interval(kind, stack.values.get(kind), error)),
    }
}

/// The profile with one stack per allocating function, however it was called: a remedy is for a function, and names it once.
fn by_title(profile: &Profile) -> Profile {
    let mut titled = Profile::new(profile.meta.clone());
    for stack in profile.stacks() {
        let mut frames: Vec<&Frame> = profile.frames_of(stack).collect();
        // Unattributed bytes belong to no function, whatever holds them.
        if profile.is_rest(stack) {
            frames = frames.split_off(frames.len() - 1);
        }
        if let Some(title) = frames.get(glue::leading_frames(frames.iter().copied())) {
            titled.add_estimate(stack.pid, &[Frame::named(title.function.clone())], None, &stack.values, &stack.errors);
        }
    }
    titled
}

/// The stacks of a process with the most of a value, by the function that allocated the memory.
fn largest<'a>(profile: &'a Profile, process: &Process, kind: ValueKind) -> Vec<(String, &'a Stack, u64)> {
    let named = |stack: &&Stack| {
        let frames: Vec<_> = profile.frames_of(stack).collect();
        let title = frames.get(glue::leading_frames(frames.iter().copied()))?;
        let is_own = *title.function != *BEFORE_ATTACH && *title.function != *UNATTRIBUTED && !profile.is_rest(stack);
        is_own.then(|| title.function.to_string())
    };
    let of_process = profile.ranked(kind).into_iter().filter(|stack| stack.pid == process.pid || stack.pid == 0);
    of_process.filter_map(|stack| Some((named(&stack)?, stack, stack.values.get(kind)))).take(STACKS_NAMED).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::fragmentation::verdict::Confidence;
    use crate::profile::testing::shop;
    use crate::profile::{HeapMoment, StandardErrors};

    #[test]
    fn a_profile_of_a_fragmented_heap_names_the_stack_that_pins_it_with_its_bytes() {
        let profile = shop();
        let (process, verdict) = judge(&profile).unwrap();
        assert_eq!((process.pid, verdict.verdict), (4242, Kind::Fragmentation));
        let first = &verdict.remedies[0];
        assert!(first.action.contains("Buffer::grow(unsigned long)"), "{first:?}");
        assert_eq!(first.predicted_bytes, Some(48 << 20));
        assert!(verdict.unknowns.iter().any(|unknown| unknown.contains("3 frees were lost")), "{:?}", verdict.unknowns);
    }

    #[test]
    fn growth_since_the_start_is_that_of_the_stack_that_holds_most() {
        let mut profile = shop();
        let process = &mut profile.meta.processes[0];
        let start = HeapSummary { live_bytes: Some(4 << 20), resident_bytes: Some(70 << 20), ..HeapSummary::default() };
        process.at_start = Some(HeapMoment { after_ms: 250, recorded_live_bytes: 0, heap: start });
        // The end is the peak.
        process.peak_inuse_bytes = Some(16 << 20);
        let (_, verdict) = judge(&profile).unwrap();
        // Two samples make no leak.
        assert_eq!((verdict.verdict, verdict.confidence), (Kind::Growing, Confidence::Low));
        assert_eq!(verdict.evidence.change.map(|change| (change.seconds, change.live_bytes_delta)), Some((10.0, 16 << 20)));
        assert!(verdict.remedies[0].action.contains("Session::create"), "{:?}", verdict.remedies);
    }

    #[test]
    fn live_bytes_that_had_been_higher_than_at_the_end_come_and_go() {
        let mut profile = shop();
        let process = &mut profile.meta.processes[0];
        let start = HeapSummary { live_bytes: Some(4 << 20), resident_bytes: Some(70 << 20), ..HeapSummary::default() };
        process.at_start = Some(HeapMoment { after_ms: 0, recorded_live_bytes: 0, heap: start });
        let peak = HeapSummary { live_bytes: Some(40 << 20), ..process.heap.unwrap() };
        process.at_peak = Some(HeapMoment { after_ms: 5000, recorded_live_bytes: 36 << 20, heap: peak });
        let (_, verdict) = judge(&profile).unwrap();
        assert_eq!(verdict.verdict, Kind::Fragmentation, "{verdict:?}");
        assert_eq!(verdict.evidence.change.map(|change| change.live_shape), Some(Shape::ComesAndGoes));
    }

    #[test]
    fn a_trim_is_that_of_the_allocator_that_serves_the_program() {
        let named = |names: &[&str]| trim_by_name(&names.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(named(&["glibc 2.36", "jemalloc 5.3.0"]).contains("mallctl"));
        assert!(named(&["glibc 2.36"]).contains("malloc_trim"));
        assert!(!named(&["mimalloc 2.1"]).contains("malloc_trim"));
    }

    #[test]
    fn growth_in_a_governed_profile_names_live_large_blocks_and_the_stacks_whose_blocks_live_long() {
        let mut profile = shop();
        profile.meta.mode = Mode::Governed;
        profile.meta.survivor_age_s = Some(10.0);
        let start = HeapSummary { live_bytes: Some(4 << 20), resident_bytes: Some(70 << 20), ..HeapSummary::default() };
        profile.meta.processes[0].at_start = Some(HeapMoment { after_ms: 0, recorded_live_bytes: 0, heap: start });
        // Windows measure no peak.
        profile.meta.processes[0].peak_inuse_bytes = None;
        let mut told = Profile::new(profile.meta.clone());
        let frames = |name: &str| [Frame::named(name)];
        let values = |kind, blocks, bytes| crate::profile::Values::default().with(kind, bytes).with(ValueKind::LargeObjects, blocks);
        told.add(4242, &frames("keeps_large"), None, &values(ValueKind::LargeSpace, 3, 3 << 20));
        told.add(4242, &frames("keeps_small"), None, &values(ValueKind::SurvivorSpace, 0, 9 << 20));
        let (_, verdict) = judge(&told).unwrap();
        assert_eq!(verdict.verdict, Kind::Growing);
        let [large, small, ..] = &verdict.remedies[..] else { panic!("{:?}", verdict.remedies) };
        assert_eq!((large.action.as_str(), large.predicted_bytes), ("free what keeps_large keeps", Some(3 << 20)));
        assert!(large.basis.contains("3 blocks above 1 KiB"), "{large:?}");
        assert_eq!((small.action.as_str(), small.predicted_bytes), ("check what keeps_small keeps", None));
        assert!(small.basis.contains("9.00 MiB of its bytes outlived 10 s"), "{small:?}");
    }

    #[test]
    fn a_function_is_named_once_with_the_sum_of_its_stacks_and_the_interval_of_the_estimate() {
        let mut profile = shop();
        profile.meta.mode = Mode::Governed;
        profile.meta.survivor_age_s = Some(10.0);
        let start = HeapSummary { live_bytes: Some(4 << 20), resident_bytes: Some(70 << 20), ..HeapSummary::default() };
        profile.meta.processes[0].at_start = Some(HeapMoment { after_ms: 0, recorded_live_bytes: 0, heap: start });
        let mut told = Profile::new(profile.meta.clone());
        let values = crate::profile::Values::default().with(ValueKind::SurvivorSpace, 8 << 20);
        for (caller, error) in [("left", 3 << 20), ("right", 4 << 20)] {
            let frames = [Frame::named("malloc"), Frame::named("keeps"), Frame::named(caller)];
            told.add_estimate(4242, &frames, None, &values, &StandardErrors::default().with(ValueKind::SurvivorSpace, error));
        }
        let remedies = judge(&told).unwrap().1.remedies;
        let of_keeps: Vec<_> = remedies.iter().filter(|remedy| remedy.action.contains("keeps")).collect();
        let [one] = of_keeps[..] else { panic!("{remedies:?}") };
        // Errors of 3 and 4 MiB make one of 5 MiB, 1.96 of which are the interval.
        assert!(one.basis.contains("about 16.0 MiB of its bytes outlived 10 s (±9.80 MiB)"), "{one:?}");
    }

    #[test]
    fn a_profile_without_a_heap_gives_no_verdict() {
        let mut profile = shop();
        profile.meta.processes[0].heap = None;
        assert_eq!(judge(&profile).unwrap().1.verdict, Kind::Unknown);
    }
}
