//! `fragprof whatif`: a recorded trace, replayed under other allocators and settings.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

use super::help::examples;
use super::record::parse_duration;
use super::replaying::Replayer;
use super::whatif_page::page;
use super::whatif_text::{patch, write_report};
use super::{output, whatif_json};
use crate::error::{ExitStatus, Failed};
use crate::replay::causes::{self, Cause, Saved};
use crate::replay::curves::{self, Curve};
use crate::replay::forecast::{self, REFUSED_PERCENT, pick};
use crate::replay::{Blocks, Calibration, Enough, Figures, Prediction, Replay, Scenario, Setting, Survey};
use crate::units::{HumanBytes, counted};

/// Replay a recorded trace under other allocators and settings, and predict the resident memory under each
///
/// The trace is replayed first under the settings it was recorded with, and compared with the recorded process: extent, resident, live,
/// trimmable and pinned bytes, and the resident bytes over time. Then it is replayed under each setting; without --under, under a set of
/// those that help most often. The replayed process is confined: it reads files and gets memory, and nothing else. Nothing is predicted for
/// programs that react to memory, addresses or usable sizes, or for load that was not recorded.
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("sudo fragprof record --trace app.fpt -- CMD", "Record every call of a command"),
    ("fragprof whatif app.fpt", "Replay it under the settings that help most often"),
    ("fragprof whatif app.fpt --under glibc:arena_max=2", "Only under this one"),
    ("fragprof whatif app.fpt --under jemalloc:dirty_decay_ms=0,narenas=4 --under mimalloc", "Compare two"),
    ("fragprof whatif app.fpt --under ./liballoc.so --svg app.svg", "An allocator of one's own, with the curves"),
]))]
pub struct WhatifArgs {
    /// Trace, as written by fragprof record --trace
    #[arg(value_name = "TRACE")]
    pub trace: PathBuf,
    /// Allocator and settings, NAME[:key=value,…] or the path of a library; may be given more than once [default: a set of them]
    #[arg(long, value_name = "SETTING")]
    pub under: Vec<String>,
    /// What would be saved without the blocks of the stacks with a function whose name contains this [default: those that pin the most]
    #[arg(long, value_name = "FUNCTION")]
    pub without: Vec<String>,
    /// What would be saved if these blocks were in an arena of their own
    #[arg(long, value_name = "FUNCTION")]
    pub pool: Vec<String>,
    /// CPUs of the machine to predict for [default: those of the recorded process]
    #[arg(long, value_name = "N")]
    pub cpus: Option<u32>,
    /// Time that one replay may take
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10m")]
    pub time_limit: Duration,
    /// Memory in MiB that the recorded blocks may take [default: three quarters of what is available]
    #[arg(long, value_name = "MIB")]
    pub memory_limit: Option<u64>,
    /// Predict even if the replay under today's settings is far from the recorded process
    #[arg(long)]
    pub force: bool,
    /// Draw the resident memory over time into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write a page with the table and the curves into this file
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Write what sets the best into this file, as a patch of a Kubernetes Deployment
    #[arg(long, value_name = "FILE")]
    pub patch: Option<PathBuf>,
    /// Name of the container in the patch [default: that of the recorded process]
    #[arg(long, value_name = "NAME", requires = "patch")]
    pub container: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The result.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) trace: Traced,
    pub(super) calibration: Calibration,
    pub(super) predictions: Vec<Prediction>,
    pub(super) causes: Vec<Cause>,
    pub(super) notes: Vec<String>,
    pub(super) refused: Option<String>,
    pub(super) enough: Enough,
}

/// What the trace contains.
#[derive(Debug, Default, Serialize)]
pub(super) struct Traced {
    pub(super) comm: String,
    pub(super) pid: u32,
    pub(super) events: u64,
    pub(super) allocations: u64,
    pub(super) threads: u64,
    pub(super) duration_ns: u64,
    pub(super) lost: u64,
    pub(super) is_from_start: bool,
    pub(super) bytes: u64,
    pub(super) replay_events_per_second: f64,
}

/// Runs the command.
///
/// # Errors
/// If the trace cannot be read, no process can be started, or the output cannot be written.
pub fn run(args: &WhatifArgs) -> anyhow::Result<()> {
    for path in args.svg.iter().chain(&args.html).chain(&args.patch) {
        output::check_writable(path)?;
    }
    let replayer = Replayer::open(&args.trace, Some(args.time_limit), args.memory_limit)?;
    let (began_ns, cpus) = (replayer.survey.began_ns, args.cpus.unwrap_or(replayer.survey.header.cpus));
    let settings = settings(args, cpus)?;
    let mut trials = Trials { args, replayer, curves: Vec::new() };
    let report = trials.run(settings, cpus)?;
    if let Some(path) = &args.svg {
        let title = format!("{}: resident bytes of the heap", args.trace.display());
        let drawn = curves::svg(&title, began_ns, &trials.curves);
        output::to_file(path, |out| out.write_all(drawn.as_bytes()))?;
    }
    if let Some(path) = &args.html {
        let page = page(&args.trace.display().to_string(), &report, began_ns, &trials.curves);
        output::to_file(path, |out| out.write_all(page.as_bytes()))?;
    }
    if let Some(path) = &args.patch {
        let is_other = |best: &&Prediction| !best.environment.is_empty() && report.predictions.first().is_some_and(|today| !today.is_best);
        match pick(&report.predictions).filter(is_other) {
            Some(best) => {
                let text = patch(args.container.as_deref().unwrap_or(&report.trace.comm), best)?;
                output::to_file(path, |out| out.write_all(text.as_bytes()))?;
            }
            None if report.refused.is_some() => eprintln!("{}: not written: nothing is predicted", path.display()),
            None => eprintln!("{}: not written: no setting is better than today's", path.display()),
        }
    }
    if args.json {
        return output::print(&(whatif_json::to_string(&report)? + "\n"));
    }
    output::to_stdout(|out| write_report(out, args, &report))
}

fn settings(args: &WhatifArgs, cpus: u32) -> anyhow::Result<Vec<Setting>> {
    if args.under.is_empty() {
        return Ok(Setting::trials(cpus));
    }
    let parse = |text: &String| Setting::parse(text, cpus).map_err(|error| Failed::new(ExitStatus::Usage, format!("--under: {error}")));
    Ok(args.under.iter().map(parse).collect::<Result<_, _>>()?)
}

struct Trials<'a> {
    args: &'a WhatifArgs,
    replayer: Replayer<'a>,
    curves: Vec<Curve>,
}

impl Trials<'_> {
    /// What the blocks of stacks cost: of those that were named, else of those that pin the most.
    fn causes(&mut self, today: &Setting, first: &Replay) -> anyhow::Result<Vec<Cause>> {
        let names = &self.replayer.survey.names;
        let mut groups: Vec<(String, HashSet<u32>, bool, bool)> = Vec::new();
        for (texts, is_pool) in [(&self.args.without, false), (&self.args.pool, true)] {
            for text in texts {
                let stacks = causes::matching(names, text);
                if stacks.is_empty() {
                    let text = format!("no stack of the trace has a function whose name contains {text:?}");
                    return Err(Failed::new(ExitStatus::Usage, text).into());
                }
                groups.push((text.clone(), stacks, !is_pool, is_pool));
            }
        }
        if groups.is_empty() && self.args.under.is_empty() {
            groups.extend(causes::top(names, &first.pinned).into_iter().map(|(text, stacks)| (text, stacks, true, true)));
        }
        let figures = Figures::of(&first.resident());
        let mut found = Vec::new();
        for (stack, stacks, is_without, is_pool) in groups {
            let rest = self.replayer.replay_blocks(today, Blocks::Without(stacks.clone()), &format!("without {stack}"))?;
            let rest = rest.stopped.is_none().then(|| rest.resident());
            let without = rest.as_ref().filter(|_| is_without).map(|rest| Saved::between(figures, Figures::of(rest)));
            let mut pool = None;
            if let Some(rest) = rest.filter(|_| is_pool) {
                let own = self.replayer.replay_blocks(today, Blocks::Only(stacks.clone()), &format!("with {stack} alone"))?;
                pool = own.stopped.is_none().then(|| Saved::between(figures, Figures::of(&forecast::sum(&rest, &own.resident()))));
            }
            let pinned_bytes = causes::pinned_bytes(&first.pinned, &stacks);
            found.push(Cause { stack, stacks: stacks.len(), pinned_bytes, without, pool });
        }
        Ok(found)
    }

    fn run(&mut self, settings: Vec<Setting>, cpus: u32) -> anyhow::Result<Report> {
        let survey = &self.replayer.survey;
        let (today, mut notes) = Setting::today(&survey.header, survey.end.as_ref(), cpus);
        notes.extend(doubts(survey));
        let mut census_at = self.replayer.even();
        census_at.extend(self.replayer.compared());
        let first = self.replay(&today, census_at)?;
        let survey = &self.replayer.survey;
        // A replay that ended early is not the recorded process.
        let calibration = if first.stopped.is_none() { Calibration::of(survey, &first) } else { Calibration::default() };
        let off = calibration.error_percent().unwrap_or(0.0).abs();
        if first.stopped.is_none() && calibration.error_percent().is_none() {
            notes.push("the trace has no census and no samples of the process: the replay is not compared with it".to_owned());
        }
        let recorded = forecast::recorded_resident(survey, &first);
        if !recorded.is_empty() {
            self.curves.insert(0, Curve { name: "recorded".to_owned(), samples: recorded });
        }
        let mut predictions = vec![self.predicted(&today, &first, off)?];
        let refused = match &first.stopped {
            Some(reason) => Some(format!("the replay under today's settings ended early: {reason}")),
            None if off > REFUSED_PERCENT && !self.args.force => Some(format!(
                "the replay under today's settings differs from the recorded process by {off:.0} %: nothing is predicted (--force predicts \
                 nevertheless)"
            )),
            None => None,
        };
        if refused.is_none() {
            for setting in settings.into_iter().filter(|setting| setting.environment != today.environment || setting.missing.is_some()) {
                predictions.push(match setting.missing {
                    Some(package) => Prediction::failed(setting.label, Vec::new(), format!("not installed: package {package}")),
                    None => {
                        let done = self.replay(&setting, self.replayer.even())?;
                        self.predicted(&setting, &done, off)?
                    }
                });
            }
            if self.args.under.is_empty() {
                for text in forecast::combinations(&predictions) {
                    let setting = Setting::parse(&text, cpus).context("a combination of valid settings is valid")?;
                    let done = self.replay(&setting, self.replayer.even())?;
                    predictions.push(self.predicted(&setting, &done, off)?);
                }
            }
            forecast::rank(&mut predictions);
        }
        let causes = if refused.is_none() { self.causes(&today, &first)? } else { Vec::new() };
        let survey = &self.replayer.survey;
        let enough = match refused {
            Some(_) => Enough { is_enough: false, why: "nothing is predicted".to_owned() },
            None => Enough::of(survey, &predictions),
        };
        let bytes = std::fs::metadata(&self.args.trace).map_or(0, |meta| meta.len());
        let trace = Traced {
            comm: survey.header.comm.clone(),
            pid: survey.header.pid,
            events: survey.events,
            allocations: survey.allocations,
            threads: survey.threads,
            duration_ns: survey.duration_ns(),
            lost: survey.lost,
            is_from_start: survey.header.is_from_start,
            bytes,
            replay_events_per_second: survey.events as f64 / first.took.as_secs_f64().max(1e-9),
        };
        Ok(Report { trace, calibration, predictions, causes, notes, refused, enough })
    }

    /// A replay of all blocks, whose curve is kept.
    fn replay(&mut self, setting: &Setting, census_at_ns: Vec<u64>) -> anyhow::Result<Replay> {
        let done = self.replayer.replay_all(setting, census_at_ns)?;
        if done.stopped.is_none() {
            self.curves.push(Curve { name: setting.label.clone(), samples: done.resident() });
        }
        Ok(done)
    }

    /// The prediction from a replay. Where the heap has blocks from before the recording, it is replayed once more without the holes between
    /// them: how they came about under another allocator is not known, and the difference widens the bracket.
    fn predicted(&mut self, setting: &Setting, done: &Replay, off_percent: f64) -> anyhow::Result<Prediction> {
        let has_threads = self.replayer.survey.has_several_threads();
        let mut prediction = Prediction::of(setting.label.clone(), setting.lines(), done, has_threads, off_percent);
        if done.stopped.is_none() && !self.replayer.survey.seed.regions.is_empty() {
            let scenario = Scenario { environment: setting.environment.clone(), without_holes: true, ..Scenario::default() };
            let dense = self.replayer.replay(&scenario, &format!("{}, without holes", setting.label))?;
            if dense.stopped.is_none() {
                prediction.widen(Figures::of(&dense.resident()));
            }
        }
        Ok(prediction)
    }
}

/// What makes predictions from this trace doubtful.
pub(super) fn doubts(survey: &Survey) -> Vec<String> {
    let mut doubts = Vec::new();
    if !survey.header.converted_from.is_empty() {
        doubts.push(format!("converted from {}, which does not tell: {}", survey.header.converted_from, survey.header.lacks.join("; ")));
    }
    if survey.end.is_none() {
        doubts.push("the trace was cut: it is replayed as far as it goes".to_owned());
    } else if let Some(reason) = survey.end.as_ref().map(|end| &end.cut_short).filter(|reason| !reason.is_empty()) {
        doubts.push(format!("the trace ends before the recording: {reason}"));
    }
    if survey.lost > 0 {
        doubts.push(format!("{} were lost: blocks are missing, or are never freed", counted(survey.lost, "record")));
    }
    if !survey.header.is_from_start && survey.images == 0 {
        let blocks = survey.seed.chunks().filter(|chunk| chunk.free.is_none());
        let (count, bytes) = blocks.fold((0, 0), |(count, bytes), block| (count + 1, block.usable_bytes.saturating_add(bytes)));
        let missing = survey.end.as_ref().map_or("the trace was cut", |end| &end.no_seed);
        if !missing.is_empty() {
            doubts.push(format!("the recording began while the process ran, and not all blocks from before are known: {missing}"));
        }
        doubts.push(match count {
            0 => "blocks from before the recording are not replayed".to_owned(),
            _ => format!(
                "the recording began while the process ran: {} ({}) from before are made at the beginning, by address",
                counted(count, "block"),
                HumanBytes(bytes)
            ),
        });
    }
    let (bytes, resident_bytes) =
        survey.large.values().fold((0u64, 0u64), |sum, one| (sum.0.saturating_add(one.bytes), sum.1.saturating_add(one.resident_bytes)));
    let percent = resident_bytes as f64 / bytes.max(1) as f64 * 100.0;
    if bytes > 0 && percent < 99.0 {
        doubts.push(format!(
            "censuses of the recording saw {percent:.0} % of its blocks of 16 KiB and more resident: those of each stack are touched as far as \
             its own were, and as a whole where none was seen"
        ));
    }
    if survey.mapped_bytes_max > 0 {
        doubts.push(format!(
            "the program also mapped up to {} itself, which are not part of any figure",
            HumanBytes(survey.mapped_bytes_max)
        ));
    }
    doubts
}
