//! `fragprof top`: the memory of processes, live.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::{ArgGroup, Args, ValueEnum};

use super::debug_information;
use super::frames::Frames;
use super::help::examples;
use super::record::{failed, parse_duration};
use super::stop::stop_flag;
use super::{log, output, top_cluster};
use crate::client::{Access, AccessError, Address, Credentials, Server};
use crate::error::{ExitStatus, Failed};
use crate::session::{Options, Recorder};
use crate::tui::collect::Collector;
use crate::tui::live::{self, Left};
use crate::tui::node;
use crate::tui::node::embedded::Embedded;
use crate::tui::node::live::Settings;
use crate::tui::node::source::{self, Feed, Wanted};
use crate::tui::sample::{Sample, SortKey};
use crate::tui::text;
use crate::units::Pid;

/// Show the memory of all processes live, or one process with its live bytes, allocation rate and top stacks
///
/// Without --pid it shows all processes, as the agent of this machine sees them, or, if no agent runs, by a census of its own; neither sets
/// probes in them. With --pid it traces every malloc and free of the process, at about 2 µs per pair, or records its emitter's samples if it
/// has one, and shows call stacks; what was allocated before is unknown. On a terminal the view is interactive (? lists the keys); elsewhere
/// each sample is printed as text, or with --json as one object per line. With --prometheus it shows the workloads of all nodes by version, from
/// the series that a Prometheus scraped from the agents: versions that need more memory per process than those before them first, then those
/// that hold the most free memory.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("server").args(["url", "prometheus"]))]
#[command(after_help = examples(&[
    ("fragprof top", "All processes"),
    ("fragprof top --url http://node7:9746 --token-file token", "All processes of another machine's agent"),
    ("fragprof top --prometheus http://prometheus:9090", "The workloads of all nodes that a Prometheus scrapes, by version"),
    ("sudo fragprof top -p PID", "One process, with its call stacks"),
    ("sudo fragprof top -p PID --once --json", "One sample as JSON"),
]))]
pub struct TopArgs {
    /// Process to trace; can be given several times
    #[arg(short, long, value_name = "PID")]
    pub pid: Vec<u32>,
    /// Frames to show: of native code, of managed runtimes, or all
    #[arg(long, value_enum, default_value_t)]
    pub frames: Frames,
    /// Agent to show: http://HOST:PORT, https://HOST:PORT, or unix:PATH for its socket [default: the agent of this machine, if it answers]
    #[arg(long, value_name = "URL", conflicts_with = "pid")]
    pub url: Option<String>,
    /// Prometheus, or a compatible server, that scrapes the agents: http://HOST:PORT[/PREFIX] or https://HOST[/PREFIX]
    #[arg(long, value_name = "URL", conflicts_with = "pid")]
    pub prometheus: Option<String>,
    /// Tenant of the Prometheus-compatible server, sent as X-Scope-OrgID
    #[arg(long, value_name = "TENANT", requires = "prometheus")]
    pub tenant: Option<String>,
    /// File that contains the agent's or the server's token
    #[arg(long, value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// File with the certificates (PEM) of the authorities to trust with https instead of the system's
    #[arg(long, value_name = "FILE", requires = "server")]
    pub ca_file: Option<PathBuf>,
    /// Time between two samples, such as 500ms or 5s
    #[arg(short, long, value_name = "TIME", value_parser = parse_duration, default_value = "1s")]
    pub interval: Duration,
    /// Print one sample, taken after one interval, and exit
    #[arg(long)]
    pub once: bool,
    /// Print samples as JSON objects
    #[arg(long)]
    pub json: bool,
    /// Value to rank printed stacks by
    #[arg(long, value_enum, default_value_t = Sort::Live)]
    pub sort: Sort,
}

/// The value by which stacks are ranked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Live bytes
    Live,
    /// Live blocks
    Count,
    /// Bytes allocated per second
    Bytes,
    /// Allocations per second
    Allocations,
    /// Bytes by which the address space grew
    Growth,
}

impl From<Sort> for SortKey {
    fn from(sort: Sort) -> Self {
        match sort {
            Sort::Live => Self::Live,
            Sort::Count => Self::Count,
            Sort::Bytes => Self::BytesPerSecond,
            Sort::Allocations => Self::AllocationsPerSecond,
            Sort::Growth => Self::Growth,
        }
    }
}

/// Longest step of the recording between two checks of the stop flag.
const STEP: Duration = Duration::from_millis(100);
/// Shortest step of the recording between two samples.
const STEP_MIN: Duration = Duration::from_millis(10);
/// Samples that may wait for the view. One is enough: a late view needs only the newest.
const SAMPLES_WAITING: usize = 1;

/// Runs the command.
///
/// # Errors
/// If a process cannot be watched, or the output cannot be written.
pub fn run(args: &TopArgs) -> anyhow::Result<()> {
    let stop = stop_flag()?;
    if let Some(url) = &args.prometheus {
        return top_cluster::run(&server(args, url)?, args.once, args.json, args.interval, &stop);
    }
    let prints = args.once || args.json || !is_terminal();
    let recorded;
    let pids = if args.pid.is_empty() {
        let Some(pid) = of_all(args, prints, &stop)? else { return Ok(()) };
        recorded = pid;
        std::slice::from_ref(&recorded)
    } else {
        args.pid.as_slice()
    };
    debug_information::look(None);
    let mut recorder = Recorder::new(Options::default()).map_err(failed)?;
    for pid in pids {
        recorder.watch(Pid(*pid)).map_err(failed)?;
    }
    if prints {
        return print(args, recorder, &stop);
    }
    show(args, recorder, &stop)
}

/// The default addresses of this machine's agent.
const LOCAL_AGENTS: [&str; 2] = ["unix:/run/fragprof/agent.sock", "http://127.0.0.1:9746"];

/// A server at this address, with the access that the options give.
fn server(args: &TopArgs, url: &str) -> anyhow::Result<Server> {
    let token = args.token_file.as_ref().map(|path| {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        anyhow::Ok(text.lines().next().unwrap_or_default().trim().to_owned())
    });
    let authorities = args.ca_file.as_ref().map(|path| std::fs::read(path).with_context(|| format!("cannot read {}", path.display())));
    let access = Access {
        credentials: token.transpose()?.map_or(Credentials::None, Credentials::Token),
        authorities: authorities.transpose()?,
        tenant: args.tenant.clone(),
        ..Access::default()
    };
    let wrong = |error: String| Failed::new(ExitStatus::Usage, error);
    let address = Address::parse(url).map_err(|error| wrong(error.to_string()))?;
    if args.ca_file.is_some() && !address.is_tls() {
        let option = if args.prometheus.is_some() { "--prometheus" } else { "--url" };
        return Err(wrong(format!("--ca-file is for https, and {option} is {}", address.url())).into());
    }
    let server = Server::new(address, &access).map_err(|error| {
        let of = |option: &str, path: &Option<PathBuf>| path.as_ref().map(|path| format!("{option} {}: {error}", path.display()));
        let named = match &error {
            AccessError::Credentials(_) => of("--token-file", &args.token_file),
            AccessError::Authorities(_) => of("--ca-file", &args.ca_file),
            _ => None,
        };
        wrong(named.unwrap_or_else(|| error.to_string()))
    });
    Ok(server?)
}

/// The given agent, or that of this machine if it answers, or else a census of this command's own.
fn feed(args: &TopArgs) -> anyhow::Result<Feed> {
    if let Some(url) = &args.url {
        return Ok(Feed::Agent(server(args, url)?));
    }
    for url in LOCAL_AGENTS {
        let server = server(args, url)?;
        if server.get("/healthz").is_ok() {
            return Ok(Feed::Agent(server));
        }
    }
    Ok(Feed::Embedded(Embedded::start().context("cannot start the census thread")?))
}

/// Shows all processes. Returns the one to record, if the user selected one.
fn of_all(args: &TopArgs, prints: bool, stop: &AtomicBool) -> anyhow::Result<Option<u32>> {
    let feed = feed(args)?;
    if !prints {
        let settings = Settings { title: feed.title(), can_record: matches!(feed, Feed::Embedded(_)), colour: output::colour() };
        let wanted = Arc::<Wanted>::default();
        let samples = source::start(feed, args.interval, Arc::clone(&wanted)).context("cannot start the thread that fetches samples")?;
        let held = log::hold();
        let shown = node::live::show(&samples, &wanted, &settings, stop);
        drop(held);
        return shown.context("the terminal failed");
    }
    if let Feed::Embedded(embedded) = &feed {
        embedded.settle();
    }
    while !stop.load(Ordering::Relaxed) {
        let view = feed.processes().map_err(|error| Failed::new(ExitStatus::Target, format!("{}: {error}", feed.title())))?;
        output::print(&if args.json { serde_json::to_string(&view)? + "\n" } else { node::cells::page(&view) })?;
        if args.once {
            break;
        }
        std::thread::sleep(args.interval);
    }
    Ok(None)
}

fn is_terminal() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
}

/// Drives the collector until `due`, `stop`, or the end of the processes, and for a short time even if it is late, because the recording's
/// periodic work must be done. Returns whether to continue after a sample.
fn drive(collector: &mut Collector, due: Instant, stop: &AtomicBool) -> bool {
    while !stop.load(Ordering::Relaxed) {
        let left = due.saturating_duration_since(Instant::now());
        if !collector.step(left.clamp(STEP_MIN, STEP)) {
            return false;
        }
        if left <= STEP_MIN {
            return true;
        }
    }
    false
}

fn print(args: &TopArgs, recorder: Recorder, stop: &AtomicBool) -> anyhow::Result<()> {
    // No user waits for a key press: each sample can be complete.
    let mut collector = Collector::new(recorder, Duration::MAX, args.frames.into());
    // The first sample is the base for the rates of the next.
    collector.sample();
    let mut due = Instant::now();
    loop {
        // Late samples are not repeated.
        due = Instant::now().max(due + args.interval);
        let go_on = drive(&mut collector, due, stop);
        let sample = collector.sample();
        let page = if args.json { object(&sample)? } else { text::page(&sample, args.sort.into()) };
        let mut out = io::stdout().lock();
        match out.write_all(page.as_bytes()).and_then(|()| out.flush()) {
            // The reader closed the pipe (`| head`).
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written.context("cannot write to standard output")?,
        }
        if args.once || !go_on {
            return Ok(());
        }
    }
}

fn object(sample: &Sample) -> anyhow::Result<String> {
    Ok(serde_json::to_string(sample).context("cannot write the sample as JSON")? + "\n")
}

fn show(args: &TopArgs, recorder: Recorder, stop: &AtomicBool) -> anyhow::Result<()> {
    let (sender, samples) = sync_channel(SAMPLES_WAITING);
    let done = Arc::<AtomicBool>::default();
    let thread = collect(recorder, args.interval, args.frames, sender, Arc::clone(&done)).context("cannot start the collector's thread")?;
    let held = log::hold();
    let left = live::show(&samples, stop, output::colour());
    drop(held);
    done.store(true, Ordering::Relaxed);
    // Dropped before the join: the thread must not wait for the view.
    drop(samples);
    let collected = thread.join();
    match left.context("the terminal failed")? {
        Left::Asked if collected.is_ok() => Ok(()),
        _ => anyhow::bail!("the collector failed"),
    }
}

fn collect(
    recorder: Recorder,
    interval: Duration,
    frames: Frames,
    samples: SyncSender<Sample>,
    done: Arc<AtomicBool>,
) -> io::Result<JoinHandle<()>> {
    Builder::new().name("fragprof-top".into()).spawn(move || {
        // At most half an interval for symbol names, so that samples are in time.
        let mut collector = Collector::new(recorder, interval / 2, frames.into());
        let mut due = Instant::now();
        loop {
            let go_on = drive(&mut collector, due, &done);
            let sample = collector.sample();
            if !go_on {
                // The last sample must arrive, however late the view is; a closed view takes none.
                let _ = samples.send(sample);
                return;
            }
            // A late view misses this sample.
            let _ = samples.try_send(sample);
            due = Instant::now().max(due + interval);
        }
    })
}
