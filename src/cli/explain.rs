//! `fragprof explain`: what is wrong with a process's memory, and what would help.

use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use serde::Serialize;

use super::census::{failed, open, reading};
use super::explain_trace::{Judged, judged};
use super::help::examples;
use super::reachability::Reachability;
use super::record::parse_duration;
use super::replaying::is_trace;
use super::{output, past, progress, report, runtime_parts};
use crate::census::live::LiveMemory;
use crate::census::not_malloc::shared_bytes;
use crate::census::{Census, LayoutCache, Level, Memory as _, Options, Pace, take};
use crate::emitter::Finder;
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::recorded;
use crate::fragmentation::trend::LOOKS_MIN;
use crate::fragmentation::verdict::{Change, Remedy, Source, TrendSample, TrendSamples, Verdict, judge};
use crate::managed::account::{self, Account};
use crate::managed::hotspot::native::Native;
use crate::model::view::unix_s;
use crate::probe::features::Features;
use crate::process::Process;
use crate::process::container::{CgroupMemory, Container, Hierarchies, Surroundings};
use crate::profile::ValueKind;
use crate::profile::coverage::Coverage;
use crate::sanitize::terminal;
use crate::store::Reader;
use crate::store::view::TrackRecord;
use crate::units::{HumanBytes, HumanDuration, Pid, counted};

/// Time within which a runtime's own counters are read after a census. The first time, symbols of the runtime are read too: if that takes
/// longer, its changes are counted from the next sample on.
const RUNTIME_WITHIN: Duration = Duration::from_millis(50);
/// Default time over which samples of a process are taken.
const OVER: Duration = Duration::from_secs(6);
/// Most samples: more say nothing more about growth.
const LOOKS_MAX: u32 = 48;
/// Largest share of the time spent sampling, so that a process with a large heap is not slowed more than necessary.
const SHARE_MAX: f64 = 0.25;
/// Smallest part of the memory outside malloc that is listed.
const PART_BYTES_MIN: u64 = 1 << 20;

/// Explain what is wrong with a process's memory, with the evidence and the remedies
///
/// For a process, it takes several censuses over six seconds, or the time given with --over, and compares the low-water marks of the live
/// bytes. Such a short time cannot distinguish a leak from a cache that fills or a load that rises: the verdict is then "growing", and what
/// is not known is listed. For a profile, it judges the heap at the end of the recording and its growth since the start, and names the
/// stacks responsible. For a trace, it replays the recorded calls, judges the heap near their end, and replays them again under each setting
/// that would help: what the setting saves is then measured rather than assumed.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof explain PID", "Verdict from six seconds of samples"),
    ("sudo fragprof explain PID --over 1h", "Distinguish a leak from a cache that fills"),
    ("fragprof explain fragprof.pb.gz", "Verdict on a recording, with the stacks responsible"),
    ("fragprof explain app.fpt", "Verdict on a trace (record --trace), with the effect of settings replayed"),
]))]
pub struct ExplainArgs {
    /// Process id, profile file (gzipped pprof), or trace
    #[arg(value_name = "PID|FILE")]
    pub what: PathBuf,
    /// Time over which to take samples, 48 at most; distinguishing a leak from a cache that fills takes half an hour [default: 6s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration, conflicts_with = "once")]
    pub over: Option<Duration>,
    /// Take a single sample: shows the state of the heap, but not whether it grows
    #[arg(long)]
    pub once: bool,
    /// Do not scan the heap for what holds the pinned bytes, or for blocks to which no pointer is left
    #[arg(long)]
    pub no_owners: bool,
    /// Directory of the agent's history, for what earlier predictions were worth [default: /var/lib/fragprof, if it can be read]
    #[arg(long, value_name = "DIRECTORY")]
    pub history: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Judges a process or a profile.
///
/// # Errors
/// If the process or the file cannot be read, or the output cannot be written.
pub fn run(args: &ExplainArgs) -> anyhow::Result<()> {
    match args.what.to_str().and_then(|text| text.parse().ok()) {
        Some(pid) => of_process(args, pid),
        None if is_trace(&args.what) => of_trace(args),
        None => of_profile(args),
    }
}

fn usage(text: String) -> Failed {
    Failed::new(ExitStatus::Usage, text)
}

/// Refuses what only applies to a process.
fn check_file(args: &ExplainArgs) -> Result<(), Failed> {
    let file = args.what.display();
    match args.over.is_some() || args.once {
        true => Err(usage(format!("--over and --once need a process: {file} is a file, whose recording has its own start and end"))),
        false => Ok(()),
    }
}

fn of_trace(args: &ExplainArgs) -> anyhow::Result<()> {
    check_file(args)?;
    let Judged { comm, pid, verdict } = judged(&args.what)?;
    print(args, &comm, pid, &verdict, &Beside::default())
}

fn of_profile(args: &ExplainArgs) -> anyhow::Result<()> {
    check_file(args)?;
    let file = args.what.display();
    let profile = report::load(&args.what)?;
    let (process, verdict) = recorded::judge(&profile).ok_or_else(|| usage(format!("{file} does not say which process it is from")))?;
    let beside = Beside { coverage: Some(Coverage::of(&profile)), ..Beside::default() };
    print(args, &process.comm, process.pid, &verdict, &beside)
}

/// Takes censuses, and judges.
fn of_process(args: &ExplainArgs, pid: u32) -> anyhow::Result<()> {
    let memory = open(pid)?;
    let comm = memory.process().comm().to_owned();
    let shown = progress::show(reading());
    let over = if args.once { Duration::ZERO } else { args.over.unwrap_or(OVER) };
    let mut native = Process::open(Pid(pid)).ok().and_then(Native::open).and_then(Result::ok);
    let seen = looks(&memory, pid, &comm, over, native.as_mut())?;
    let mut verdict = judge(&seen.census, seen.change);
    let reachability = match args.no_owners {
        true => Reachability::default(),
        false => Reachability::of(&memory, (pid, &comm), &verdict, live_blocks(&seen.census), over.is_zero()),
    };
    drop(shown);
    if !memory.process().is_alive() {
        return Err(Failed::new(ExitStatus::Target, format!("process {pid} ended while it was being read")).into());
    }
    let surroundings = Surroundings::of(Pid(pid), &Hierarchies::find());
    let mut track_record = Vec::new();
    if let Some(reader) = past::open_if_any(args.history.as_deref())? {
        add_pinning_stacks(&reader, memory.process(), &mut verdict)?;
        track_record = self::track_record(&reader, memory.process(), &verdict)?;
    }
    verdict.unknowns.extend(reachability.left_out.iter().cloned());
    verdict.unknowns.extend(shared_words(&memory, &seen.ranges));
    if seen.unusable > 0 && !over.is_zero() {
        let count = counted(seen.unusable as u64, "sample");
        verdict.unknowns.push(format!("what {count} would have shown: too much of the heap changed during the census"));
    }
    verdict.sources.push(Source::new("stacks", stacks_of(memory.process())));
    print(args, &comm, pid, &verdict, &Beside { surroundings, coverage: None, reachability, track_record, runtime: seen.runtime })
}

/// What earlier predictions of a verdict's remedies were worth, from the agent's history.
fn track_record(reader: &Reader, process: &Process, verdict: &Verdict) -> anyhow::Result<Vec<TrackRecord>> {
    let id = process.id();
    let asked = reader.workload_of(id.pid.0, id.start_ticks).and_then(|workload| {
        // A process that the agent does not watch has no container's name.
        reader.track_records(workload.as_deref().unwrap_or(process.comm()))
    });
    let named = |record: &TrackRecord| verdict.remedies.iter().any(|remedy| remedy.action == record.action);
    Ok(asked?.into_iter().filter(named).collect())
}

/// Blocks in use of malloc's heaps.
fn live_blocks(census: &Census) -> u64 {
    let heaps = census.heaps.iter().filter(|heap| heap.allocator.row().runtime.is_none());
    heaps.filter_map(|heap| heap.live_allocations).fold(0, u64::saturating_add)
}

/// The result of sampling a process over some time.
struct Sampled {
    /// The last census that is usable for verdicts, or else the last one.
    census: Census,
    /// The growth that the samples show.
    change: Option<Change>,
    /// Samples that are not usable for verdicts: the heap changed too much during the census.
    unusable: usize,
    /// The memory of its managed runtime, with the changes between the first sample and the last; `None` = it has none.
    runtime: Option<Account>,
    /// Where its heaps lie, by the last census.
    ranges: Vec<Range<u64>>,
}

/// The memory of a process's managed runtime at the time of a census.
fn runtime_of(memory: &LiveMemory, census: &Census, native: Option<&mut Native>) -> Option<Account> {
    native.and_then(|native| native.look(census, &memory.threads())).or_else(|| account::python(census))
}

/// Samples a process over some time: at least four times unless the time is 0, however long that takes. A sample that is not usable is
/// left out and repeated: the next one of a heap that changes fast may be usable.
fn looks(memory: &LiveMemory, pid: u32, comm: &str, over: Duration, mut native: Option<&mut Native>) -> anyhow::Result<Sampled> {
    let options = Options { level: Level::Full, pace: Pace::of_command(0), with_not_malloc: true };
    let mut layouts = LayoutCache::default();
    let mut looks = TrendSamples::new(LOOKS_MAX as usize);
    // What it held before shows in its peak before the first sample.
    looks.set_former_peak(memory.process().peak_resident_bytes().unwrap_or(0));
    let mut kept: Option<(Census, bool)> = None;
    let mut unusable = 0;
    let mut runtime: Option<Account> = None;
    // Whether its counters are of a later time than the census, and are to be read once more.
    let mut is_late = false;
    let started = Instant::now();
    loop {
        let began = started.elapsed();
        let taken = take(memory, pid, comm, options, &mut layouts).map_err(failed)?;
        let ranges = taken.heaps.iter().flat_map(|heap| heap.extents.iter().map(|(_, range)| range.clone())).collect();
        let census = taken.census;
        let now = started.elapsed();
        // A sample shows the heap as it was halfway through the census.
        let is_first = runtime.is_none() || is_late;
        if is_first {
            let was_late = std::mem::take(&mut is_late);
            runtime = runtime_of(memory, &census, native.as_deref_mut()).or(runtime);
            is_late = !was_late && started.elapsed() - now > RUNTIME_WITHIN;
        }
        let look = TrendSample::of(&census, (began + now).as_secs_f64() / 2.0).filter(|_| census.walk.usable);
        tracing::debug!("sample of process {pid} at {began:?} took {:?}, usable {}", now - began, look.is_some());
        match look {
            Some(look) => looks.add(look),
            None => unusable += 1,
        }
        if look.is_some() || !matches!(kept, Some((_, true))) {
            kept = Some((census, look.is_some()));
        }
        let enough = over.is_zero() || (now >= over && (looks.count() >= LOOKS_MIN || looks.count() + unusable >= 2 * LOOKS_MIN));
        if let Some((census, _)) = kept.take_if(|_| enough) {
            let last = if is_first { None } else { runtime_of(memory, &census, native.as_deref_mut()) };
            let runtime = match (runtime, last) {
                (Some(first), Some(last)) => Some(last.since(&first)),
                (first, last) => last.or(first),
            };
            return Ok(Sampled { census, change: looks.change(), unusable, runtime, ranges });
        }
        std::thread::sleep(pause(over, now - began, over.saturating_sub(now)));
    }
}

/// Shared memory of a heap that is not mentioned.
const SHARED_BYTES_MAX: u64 = 1 << 20;

/// What is not known of a heap that a forked process has too.
fn shared_words(memory: &LiveMemory, ranges: &[Range<u64>]) -> Option<String> {
    let bytes = shared_bytes(&memory.resident_mappings().ok()?, ranges);
    (bytes > SHARED_BYTES_MAX).then(|| {
        let bytes = HumanBytes(bytes);
        format!("what is gained of {bytes} of the heap that other processes have too (forked): what this one gives back of it, they keep")
    })
}

/// Time until the next sample, after one that took `look`, with `left` of `over` left. Samples right after each other would distinguish
/// noise from growth no better than a single one: where they take longer than `over`, sampling continues beyond its end.
fn pause(over: Duration, look: Duration, left: Duration) -> Duration {
    let usual = (over / LOOKS_MAX).max(look.mul_f64(1.0 / SHARE_MAX - 1.0)).min(over / LOOKS_MIN as u32);
    usual.min(left.max(usual / 2))
}

/// Where live bytes by stack could come from, for a process of which only censuses are taken.
fn stacks_of(process: &Process) -> String {
    let found = Finder::new(Features::of_host().emulation()).find(process).unwrap_or_default();
    let emitter = found.emitters.iter().find(|emitter| emitter.hears());
    emitter.map_or_else(
        || "none: a census knows no stacks, and the process has no emitter; fragprof record traces every call".to_owned(),
        |emitter| {
            let every = emitter.stats.map_or_else(String::new, |stats| format!(", one sample per {}", stats.distance()));
            format!("none here: a census knows no stacks; the agent and fragprof record get them from {}{every}", emitter.describe())
        },
    )
}

/// The stacks that pin, from the last profile of the process in the agent's history that measured them.
fn add_pinning_stacks(reader: &Reader, process: &Process, verdict: &mut Verdict) -> anyhow::Result<()> {
    let id = process.id();
    let now = unix_s(SystemTime::now());
    let Some(found) = reader.find(id.pid.0, Some(id.start_ticks))?.filter(|_| verdict.has_pinned_bytes()) else { return Ok(()) };
    let Some((profile, at)) = reader.profile_at(&found, ValueKind::PinnedSpace, now)? else { return Ok(()) };
    verdict.remedies.extend(recorded::against_pinning(&profile, id.pid.0));
    let source = format!("the agent's profile of {} ago", HumanDuration((now - at).max(0.0)));
    verdict.sources.push(Source::new("stacks that pin", source));
    Ok(())
}

/// What is shown beside a verdict.
#[derive(Default)]
struct Beside {
    surroundings: Surroundings,
    /// For a profile.
    coverage: Option<Coverage>,
    reachability: Reachability,
    /// For a process.
    track_record: Vec<TrackRecord>,
    /// For a process with a managed runtime: its memory by part.
    runtime: Option<Account>,
}

fn print(args: &ExplainArgs, comm: &str, pid: u32, verdict: &Verdict, beside: &Beside) -> anyhow::Result<()> {
    output::to_stdout(|out| match args.json {
        true => write_json(out, verdict, beside),
        false => write_text(out, (comm, pid), verdict, beside),
    })
}

/// The verdict, with the process's container and memory limit.
#[derive(Serialize)]
struct Page<'a> {
    #[serde(flatten)]
    verdict: &'a Verdict,
    container: Option<&'a Container>,
    cgroup_memory: Option<&'a CgroupMemory>,
    /// For a profile: share of the live heap that has a stack; `null` if not known, for lack of a census.
    #[serde(skip_serializing_if = "Option::is_none")]
    attributed_ratio: Option<Option<f64>>,
    /// For a profile.
    #[serde(skip_serializing_if = "Option::is_none")]
    coverage: Option<&'a Coverage>,
    #[serde(flatten)]
    reachability: &'a Reachability,
    /// What earlier predictions of the remedies were worth, by their `action`.
    track_record: &'a [TrackRecord],
    /// The memory of the process's managed runtime, by part.
    #[serde(skip_serializing_if = "Option::is_none")]
    runtime: Option<&'a Account>,
}

fn write_json(out: &mut dyn Write, verdict: &Verdict, beside: &Beside) -> io::Result<()> {
    let Beside { surroundings, coverage, reachability, track_record, runtime } = beside;
    let coverage = coverage.as_ref();
    let page = Page {
        verdict,
        container: surroundings.container.as_deref(),
        cgroup_memory: surroundings.memory.as_ref(),
        attributed_ratio: coverage.map(Coverage::attributed_ratio),
        coverage,
        reachability,
        track_record,
        runtime: runtime.as_ref(),
    };
    serde_json::to_writer_pretty(&mut *out, &page)?;
    writeln!(out)
}

/// What a remedy would save: `?` if not known, `≤` before an upper limit.
fn gain(remedy: &Remedy) -> String {
    let limit = if remedy.at_most { "≤ " } else { "" };
    remedy.predicted_bytes.map_or_else(|| "?".to_owned(), |bytes| format!("{limit}{}", HumanBytes(bytes)))
}

/// What is resident outside the heaps: its parts follow it.
const NOT_MALLOC: &str = "not malloc";

fn write_text(out: &mut dyn Write, (comm, pid): (&str, u32), verdict: &Verdict, beside: &Beside) -> io::Result<()> {
    let Beside { surroundings, coverage, reachability, track_record, runtime } = beside;
    let name = serde_json::to_value(verdict.verdict)?;
    let confidence = serde_json::to_value(verdict.confidence)?;
    writeln!(
        out,
        "{} (pid {pid}): {} (confidence {})\n  {}",
        terminal(comm),
        name.as_str().unwrap_or_default(),
        confidence.as_str().unwrap_or_default(),
        verdict.summary
    )?;
    for other in verdict.findings.iter().skip(1) {
        writeln!(out, "  also {} (confidence {}): {}", other.verdict.name(), other.confidence.name(), other.summary)?;
    }
    if let Some(coverage) = coverage {
        writeln!(out, "  coverage: {}", coverage.words())?;
    }
    let ladder = &verdict.evidence.ladder;
    if let Some(container) = &surroundings.container {
        writeln!(out, "  in {}", terminal(&container.title()))?;
    }
    if let Some(sentence) = surroundings.sentence(ladder.live_bytes, ladder.trimmable_bytes) {
        writeln!(out, "  {sentence}")?;
    }
    let evidence = &verdict.evidence;
    let known = |bytes: u64| (bytes > 0).then_some(bytes);
    // Without a heap that was read there is nothing that its figures could be of.
    let of_heap = |bytes: Option<u64>| bytes.filter(|_| ladder.extent_bytes > 0);
    let steps = [
        ("resident", known(evidence.rss_bytes)),
        (NOT_MALLOC, known(evidence.not_malloc_bytes)),
        ("heap extent", of_heap(Some(ladder.extent_bytes))),
        ("heap resident", of_heap(Some(ladder.resident_bytes))),
        ("in use", of_heap(ladder.live_bytes)),
        ("in use, resident", of_heap(evidence.live_resident_bytes)),
        ("trimmable", of_heap(ladder.trimmable_bytes)),
        ("pinned", of_heap(ladder.pinned_bytes)),
        ("kept", of_heap(evidence.details.kept_bytes)),
        ("cached", of_heap(evidence.details.cached_bytes)),
        ("in huge pages", known(evidence.details.huge_bytes)),
    ];
    writeln!(out, "\n  evidence")?;
    for (name, bytes) in steps {
        if let Some(bytes) = bytes {
            writeln!(out, "    {name:<18} {:>10}", HumanBytes(bytes))?;
        }
        if name == NOT_MALLOC {
            for part in evidence.not_malloc.iter().filter(|part| part.resident_bytes >= PART_BYTES_MIN) {
                writeln!(out, "      {:<16} {:>10} in {}", part.kind, HumanBytes(part.resident_bytes), counted(part.mappings, "mapping"))?;
            }
        }
    }
    if !evidence.heaps.is_empty() {
        writeln!(out, "    heaps")?;
    }
    for part in &evidence.heaps {
        let known = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| HumanBytes(bytes).to_string());
        writeln!(
            out,
            "      {:<18} {:>8} resident, {} in use{}, {} free",
            part.heap,
            HumanBytes(part.resident_bytes),
            known(part.live_bytes),
            match part.mmapped_bytes {
                0 => String::new(),
                bytes => format!(" ({} of it mapped for single blocks)", HumanBytes(bytes)),
            },
            known(part.free_resident_bytes)
        )?;
    }
    if let Some(change) = &evidence.change {
        let sign = |delta: i64| if delta < 0 { "−" } else { "+" };
        let mut deltas = vec![("resident, change", change.resident_bytes_delta)];
        if ladder.extent_bytes > 0 {
            deltas.insert(0, ("live, change", change.live_bytes_delta));
        }
        if change.outside_bytes_delta != 0 {
            deltas.push(("outside, change", change.outside_bytes_delta));
        }
        for (name, delta) in deltas {
            writeln!(
                out,
                "    {name:<18} {:>10} in {}, {}",
                format!("{}{}", sign(delta), HumanBytes(delta.unsigned_abs())),
                HumanDuration(change.seconds),
                counted(change.looks, "sample")
            )?;
        }
    }
    if let Some(account) = runtime {
        runtime_parts::write(out, account)?;
    }
    reachability.write(out)?;
    if !verdict.remedies.is_empty() {
        writeln!(out, "\n  what would help")?;
    }
    for remedy in &verdict.remedies {
        writeln!(out, "  {:>12}  {}\n                ({})", gain(remedy), remedy.action, remedy.basis)?;
        for record in track_record.iter().filter(|record| record.action == remedy.action) {
            writeln!(out, "                {}", record.words())?;
        }
    }
    for unknown in &verdict.unknowns {
        writeln!(out, "  not known: {unknown}")?;
    }
    writeln!(out, "\n  where the numbers come from")?;
    for source in &verdict.sources {
        writeln!(out, "    {}: {}", terminal(&source.figures), terminal(&source.source))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_have_time_between_them_however_long_one_takes() {
        let ms = Duration::from_millis;
        assert_eq!(pause(ms(4800), ms(5), ms(4000)), ms(100));
        assert_eq!(pause(ms(4800), ms(100), ms(4000)), ms(300));
        // The last one is at the end.
        assert_eq!(pause(ms(4800), ms(100), ms(200)), ms(200));
        assert_eq!(pause(ms(4800), ms(100), ms(20)), ms(150));
        assert_eq!(pause(ms(4800), ms(9000), ms(0)), ms(600));
    }
}
