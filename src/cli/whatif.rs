//! `fragprof whatif`: a recorded trace, replayed under other allocators and settings.

use std::collections::HashSet;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use serde::Serialize;

use super::help::examples;
use super::output;
use super::progress::{self, Said};
use super::record::parse_duration;
use super::whatif_text::{best, patch, write_report};
use crate::census::LayoutCache;
use crate::error::{ExitStatus, Failed};
use crate::replay::causes::{self, Cause, Saved};
use crate::replay::curves::{self, Curve};
use crate::replay::forecast::{self, END_TO, REFUSED_PERCENT};
use crate::replay::{Blocks, Calibration, Figures, Limits, Prediction, Replay, ReplayError, Scenario, Setting, Survey, replay};
use crate::sanitize::terminal;
use crate::units::{HumanBytes, counted};

/// Censuses of each replay, beside those at the times of the recording's own.
const CENSUSES: u64 = 8;
/// Of the recording's own, so many are compared at most.
const COMPARED_MAX: usize = 48;

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

/// What `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) trace: Traced,
    pub(super) calibration: Calibration,
    pub(super) calibration_percent: Option<f64>,
    pub(super) predictions: Vec<Prediction>,
    pub(super) causes: Vec<Cause>,
    pub(super) notes: Vec<String>,
    pub(super) refused: Option<String>,
}

/// What the trace contains.
#[derive(Debug, Serialize)]
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
    for path in args.svg.iter().chain(&args.patch) {
        output::check_writable(path)?;
    }
    let survey = Survey::of(open(&args.trace)?).map_err(|error| invalid(&args.trace, &error.to_string()))?;
    survey.check().map_err(|reason| invalid(&args.trace, &reason))?;
    let cpus = args.cpus.unwrap_or(survey.header.cpus);
    let settings = settings(args, cpus)?;
    let defaults = Limits::default();
    let heap_bytes_max = args.memory_limit.map_or(defaults.heap_bytes_max, |mib| mib.saturating_mul(1 << 20));
    let limits = Limits { heap_bytes_max, time_max: args.time_limit, ..defaults };
    let mut trials = Trials { args, survey: &survey, limits, layouts: LayoutCache::default(), curves: Vec::new() };
    let report = trials.run(settings, cpus)?;
    if let Some(path) = &args.svg {
        let title = format!("{}: resident bytes of the heap", args.trace.display());
        let drawn = curves::svg(&title, survey.began_ns, &trials.curves);
        output::to_file(path, |out| out.write_all(drawn.as_bytes()))?;
    }
    if let Some(path) = &args.patch {
        match best(&report.predictions).filter(|best| !best.environment.is_empty()) {
            Some(best) => {
                let text = patch(args.container.as_deref().unwrap_or(&report.trace.comm), best)?;
                output::to_file(path, |out| out.write_all(text.as_bytes()))?;
            }
            None if report.refused.is_some() => eprintln!("{}: not written: nothing is predicted", path.display()),
            None => eprintln!("{}: not written: no setting is better than today's", path.display()),
        }
    }
    if args.json {
        return output::to_stdout(|out| {
            serde_json::to_writer_pretty(&mut *out, &report)?;
            writeln!(out)
        });
    }
    output::to_stdout(|out| write_report(out, args, &report))
}

fn open(path: &Path) -> anyhow::Result<BufReader<File>> {
    let file = File::open(path).map_err(|error| invalid(path, &error.to_string()))?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

fn invalid(path: &Path, reason: &str) -> Failed {
    Failed::new(ExitStatus::Usage, format!("cannot replay {}: {reason}", path.display()))
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
    survey: &'a Survey,
    limits: Limits,
    layouts: LayoutCache,
    curves: Vec<Curve>,
}

impl Trials<'_> {
    /// What the blocks of stacks cost: of those that were named, else of those that pin the most.
    fn causes(&mut self, today: &Setting, first: &Replay) -> anyhow::Result<Vec<Cause>> {
        let names = &self.survey.names;
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
            let rest = self.replay_blocks(today, Blocks::Without(stacks.clone()), &format!("without {stack}"))?;
            let rest = rest.stopped.is_none().then(|| rest.resident());
            let without = rest.as_ref().filter(|_| is_without).map(|rest| Saved::between(figures, Figures::of(rest)));
            let mut pool = None;
            if let Some(rest) = rest.filter(|_| is_pool) {
                let own = self.replay_blocks(today, Blocks::Only(stacks.clone()), &format!("with {stack} alone"))?;
                pool = own.stopped.is_none().then(|| Saved::between(figures, Figures::of(&forecast::sum(&rest, &own.resident()))));
            }
            let pinned_bytes = causes::pinned_bytes(&first.pinned, &stacks);
            found.push(Cause { stack, stacks: stacks.len(), pinned_bytes, without, pool });
        }
        Ok(found)
    }

    fn run(&mut self, settings: Vec<Setting>, cpus: u32) -> anyhow::Result<Report> {
        let survey = self.survey;
        let (today, mut notes) = Setting::today(&survey.header, survey.end.as_ref(), cpus);
        notes.extend(doubts(survey));
        let mut census_at = self.even();
        census_at.extend(self.compared());
        let first = self.replay(&today, census_at)?;
        let calibration = Calibration::of(survey, &first);
        let calibration_percent = calibration.error_percent();
        let off = calibration_percent.unwrap_or(0.0);
        if calibration_percent.is_none() {
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
                        let done = self.replay(&setting, self.even())?;
                        self.predicted(&setting, &done, off)?
                    }
                });
            }
            if self.args.under.is_empty() {
                for text in forecast::combinations(&predictions) {
                    let setting = Setting::parse(&text, cpus).context("a combination of valid settings is valid")?;
                    let done = self.replay(&setting, self.even())?;
                    predictions.push(self.predicted(&setting, &done, off)?);
                }
            }
            forecast::rank(&mut predictions);
            notes.extend(forecast::too_short(&predictions));
        }
        let causes = if refused.is_none() { self.causes(&today, &first)? } else { Vec::new() };
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
        Ok(Report { trace, calibration, calibration_percent, predictions, causes, notes, refused })
    }

    /// Evenly spread times, the last one before the teardown.
    fn even(&self) -> Vec<u64> {
        let (began, duration) = (self.survey.began_ns, self.survey.duration_ns());
        let end = u128::from(duration) * u128::from(END_TO) / 1000;
        (1..=CENSUSES).map(|nth| began.saturating_add((end * u128::from(nth) / u128::from(CENSUSES)) as u64)).collect()
    }

    /// The times of the recording's censuses, or some of them.
    fn compared(&self) -> Vec<u64> {
        let accounts: Vec<u64> = self.survey.steady_accounts().map(|account| account.time_ns).collect();
        let every = accounts.len().div_ceil(COMPARED_MAX).max(1);
        accounts.into_iter().rev().step_by(every).collect()
    }

    /// A replay of all blocks, whose curve is kept.
    fn replay(&mut self, setting: &Setting, mut census_at_ns: Vec<u64>) -> anyhow::Result<Replay> {
        census_at_ns.sort_unstable();
        census_at_ns.dedup();
        let by_stack_at_ns = self.even().last().copied();
        let scenario = Scenario { environment: setting.environment.clone(), census_at_ns, by_stack_at_ns, ..Scenario::default() };
        let done = self.replay_by(&scenario, &setting.label)?;
        if done.stopped.is_none() {
            self.curves.push(Curve { name: setting.label.clone(), samples: done.resident() });
        }
        Ok(done)
    }

    /// The prediction from a replay. Where the heap has blocks from before the recording, it is replayed once more without the holes between
    /// them: how they came about under another allocator is not known, and the difference widens the bracket.
    fn predicted(&mut self, setting: &Setting, done: &Replay, off_percent: f64) -> anyhow::Result<Prediction> {
        let mut prediction = Prediction::of(setting.label.clone(), setting.lines(), done, self.survey.threads, off_percent);
        if done.stopped.is_none() && !self.survey.seed.regions.is_empty() {
            let scenario = Scenario { environment: setting.environment.clone(), without_holes: true, ..Scenario::default() };
            let dense = self.replay_by(&scenario, &format!("{}, without holes", setting.label))?;
            if dense.stopped.is_none() {
                prediction.widen(Figures::of(&dense.resident()));
            }
        }
        Ok(prediction)
    }

    /// A replay of some blocks under a setting, without censuses.
    fn replay_blocks(&mut self, setting: &Setting, blocks: Blocks, what: &str) -> anyhow::Result<Replay> {
        let scenario = Scenario { environment: setting.environment.clone(), blocks, ..Scenario::default() };
        self.replay_by(&scenario, what)
    }

    fn replay_by(&mut self, scenario: &Scenario, what: &str) -> anyhow::Result<Replay> {
        let what = format!("replaying: {}", terminal(what));
        let shown = progress::show(move || Said { what: what.clone(), share: None });
        let done = replay(open(&self.args.trace)?, self.survey, scenario, self.limits, &mut self.layouts);
        drop(shown);
        match done {
            Ok(done) => Ok(done),
            Err(error @ ReplayError::Trace(_)) => Err(invalid(&self.args.trace, &error.to_string()).into()),
            Err(error @ ReplayError::Player(_)) => Err(error).context(Failed::new(ExitStatus::Unsupported, "nothing can be replayed")),
        }
    }
}

/// What makes predictions from this trace doubtful.
fn doubts(survey: &Survey) -> Vec<String> {
    let mut doubts = Vec::new();
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
    if survey.mapped_bytes_max > 0 {
        doubts.push(format!(
            "the program also mapped up to {} itself, which are not part of any figure",
            HumanBytes(survey.mapped_bytes_max)
        ));
    }
    doubts
}
