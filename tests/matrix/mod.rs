//! The same checks for each C library, allocator and language: whether an exact recording equals the program's own ledger, and whether a
//! census counts the live blocks. One ignored test; `make allocator-matrix` runs it and writes docs/allocators.md. It fetches packages of
//! other Debian suites, so it is not part of `make test`.

mod arm64;
mod calls;
mod cores;
mod kernels;
mod languages;
mod managed;
pub mod places;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::attach::settled;
use crate::support::process::run;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::support::truth::Truth;
use crate::support::{LIMIT, bpf};

/// The programs of a place: every entry point, short-lived threads, and rounds without an end.
const PROGRAMS: [&str; 3] = ["entry_points", "short_threads", "rounds"];
/// How long a program is recorded in windows.
const GOVERNED_FOR: Duration = Duration::from_secs(10);
/// With 1 % a slow machine has too few windows in this time; in emulation, where a probe costs a hundred times as much, with 5 % too.
const GOVERNED_BUDGET: &str = if cfg!(target_arch = "x86_64") { "5%" } else { "100%" };
/// How long it is sampled.
const SAMPLED_FOR: Duration = Duration::from_secs(5);

/// The result, as shown in the table.
enum Outcome {
    /// As expected.
    Good(String),
    /// Known not to be supported.
    NotOffered(String),
    /// Not as expected.
    Wrong(String),
}

/// Compares a recording of `command` between "ready" and its last rendezvous with its ledger.
fn exact(command: &mut Command, phase: &str) -> Outcome {
    let mut target = Target::start(command);
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to(phase);
    let report = recording.stop();
    let differences = report.differences(&truth, Since::Attach, &[]);
    let blocks: u64 = truth.sites.iter().map(|site| site.allocations).sum();
    match (differences.is_empty(), report.nonzero_losses().is_empty()) {
        (true, true) => Outcome::Good(format!("{blocks} blocks, to the byte")),
        (true, false) => Outcome::Wrong(format!("losses: {:?}", report.nonzero_losses())),
        (false, _) => Outcome::Wrong(differences),
    }
}

/// Lets the program go through rounds for so long, and ends its recording; the program's ledger then.
fn rounds(target: &mut Target, recording: &mut Recording, span: Duration) -> Result<Truth, Outcome> {
    recording.wait_until_attached(1);
    let began = Instant::now();
    let mut truth = target.go_to("round");
    while began.elapsed() < span {
        truth = target.go_to("round");
    }
    recording.process.signal(rustix::process::Signal::INT);
    if recording.wait(LIMIT).success() { Ok(truth) } else { Err(Outcome::Wrong(recording.process.err.all())) }
}

/// Compares the estimate from windows over a process that allocates some thousand blocks per second with its ledger.
fn governed(command: &mut Command) -> Outcome {
    let mut target = Target::start(command.env("TRUTH_PACE", "1"));
    let mut record = fragprof();
    record.args(["record", "--mode", "governed", "--no-large-blocks", "--budget", GOVERNED_BUDGET, "--duration", "300s"]);
    record.args(["-p", &target.pid().to_string()]);
    let mut recording = Recording::start(&mut record, &[]);
    let truth = match rounds(&mut target, &mut recording, GOVERNED_FOR) {
        Ok(truth) => truth,
        Err(wrong) => return wrong,
    };
    let done = run(fragprof().arg("report").arg(recording.file()).args(["--by", "survivors", "--json"]));
    let page: Value = serde_json::from_str(&done.out).unwrap_or_default();
    let figure = |key: &str| page["totals"][key].as_f64().unwrap_or(0.0);
    let made = truth.sites.iter().map(|site| site.allocations).sum::<u64>() as f64;
    // With one window alone there is no estimate.
    if page["totals"]["allocations_est"].is_null() {
        let text = format!("≥ {:.2} of {made} blocks", figure("allocations_min") / made);
        return if figure("allocations_min") <= 1.1 * made { Outcome::Good(text) } else { Outcome::Wrong(text) };
    }
    let (est, error) = (figure("allocations_est"), figure("allocations_stderr"));
    let text = format!("{:.2} ± {:.2} of {made} blocks", est / made, 1.96 * error / made);
    // Five standard errors, because there are dozens of cells, and a tenth for the seconds before the first window.
    if (est - made).abs() <= 5.0 * error + made / 10.0 { Outcome::Good(text) } else { Outcome::Wrong(text) }
}

/// The sampler's arguments: a sample for each 16 KiB.
const SAMPLING: [&str; 4] = ["--sample-bytes", "16384", "--samples-per-second", "0"];

/// Starts a program and brings the sampler to it.
fn attached(command: &mut Command) -> Result<Target, Outcome> {
    let target = Target::start(command);
    let report =
        settled(&["attach-sampler", &target.pid().to_string()].iter().chain(&SAMPLING).map(|word| (*word).to_owned()).collect::<Vec<_>>());
    match (report["refused"].as_str(), report["unseen"].as_str()) {
        (None, None) => Ok(target),
        (Some("musl"), _) => Err(Outcome::NotOffered("refused: musl".into())),
        (Some(why), _) => Err(Outcome::Wrong(why.to_owned())),
        (None, Some(allocator)) => Err(Outcome::NotOffered(format!("says that it does not see {allocator}"))),
    }
}

/// Starts a program with the sampler, where it cannot be brought to a running one.
fn preloaded(command: &Command) -> Result<Target, Outcome> {
    let with_sampler = || {
        let mut started = fragprof();
        started.arg("run").args(SAMPLING).arg("--").arg(command.get_program()).args(command.get_args());
        started.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
        started
    };
    // It ends at once without a socket; what is not sampled has been said by then.
    let said = run(with_sampler().env("TRUTH_SOCKET", "/nowhere")).err;
    if said.contains("is statically linked") {
        return Err(Outcome::NotOffered("refused: statically linked".into()));
    }
    match said.split_once("it has an allocator linked in (").and_then(|(_, rest)| rest.split_once(')')) {
        Some((allocator, _)) => Err(Outcome::NotOffered(format!("says that it does not see {allocator}"))),
        None => Ok(Target::start(&mut with_sampler())),
    }
}

/// Samples a process that allocates some thousand blocks per second, and compares what a recording of its samples estimates with its ledger.
fn sampled(command: &mut Command, is_hosted: bool) -> Outcome {
    command.env("TRUTH_PACE", "1");
    let started = if cfg!(target_arch = "x86_64") { attached(command) } else { preloaded(command) };
    let mut target = match started {
        Ok(target) => target,
        Err(outcome) => return outcome,
    };
    let pid = target.pid().to_string();
    let mut recording = Recording::start(fragprof().args(["record", "--mode", "sampled", "--duration", "300s", "-p", &pid]), &[]);
    let truth = match rounds(&mut target, &mut recording, SAMPLED_FOR) {
        Ok(truth) => truth,
        Err(wrong) => return wrong,
    };
    let done = run(fragprof().arg("report").arg(recording.file()).arg("--json"));
    let page: Value = serde_json::from_str(&done.out).unwrap_or_default();
    let of = |name: &str, actual: u64| {
        let figure = |kind: &str| page["totals"][format!("{name}_bytes_{kind}")].as_f64().unwrap_or(0.0) / actual as f64;
        let (est, error) = (figure("est"), figure("stderr"));
        // Five standard errors, because there are dozens of cells; a runtime of another language allocates a little of its own.
        let fits = est >= 1.0 - 5.0 * error && est <= 1.0 + 5.0 * error + if is_hosted { 0.1 } else { 0.0 };
        (format!("{est:.2} ± {:.2}", 1.96 * error), fits)
    };
    let (made, made_fits) = of("allocated", truth.sites.iter().map(|site| site.allocated_bytes).sum());
    let (live, live_fits) = of("inuse", truth.live().0);
    let text = format!("{made} of the bytes allocated, {live} of the live ones");
    if made_fits && live_fits { Outcome::Good(text) } else { Outcome::Wrong(text) }
}

/// Live bytes and blocks that a census counts; the error says why it does not count them.
fn counted(pid: u32) -> Result<(u64, u64), String> {
    let done = run(fragprof().args(["census", &pid.to_string(), "--json"]));
    if !done.status.success() {
        return Err(done.err.lines().next().unwrap_or_default().to_owned());
    }
    let page: Value = serde_json::from_str(&done.out).unwrap();
    let mut reasons = page["layout_unknown"].as_array().into_iter().flatten().filter_map(Value::as_str);
    if let Some(reason) = reasons.find(|reason| reason.contains("its heap is not supported")) {
        return Err(reason.split(':').next().unwrap_or(reason).to_owned());
    }
    let heaps = page["heaps"].as_array().cloned().unwrap_or_default();
    let sum = |key: &str| heaps.iter().filter_map(|heap| heap[key].as_u64()).sum::<u64>();
    let unread: Vec<String> =
        heaps.iter().filter(|heap| heap["live_bytes"].is_null()).map(|heap| heap["allocator"].as_str().unwrap_or("?").to_owned()).collect();
    match (sum("live_bytes"), unread.is_empty()) {
        (0, true) => Err("no reader".into()),
        (0, false) => Err(format!("extent and residency only ({})", unread.join(", "))),
        (bytes, _) => Ok((bytes, sum("live_allocations"))),
    }
}

/// Compares a census of a process that keeps thousands of blocks with its ledger: live blocks, and their bytes with rounding. The thread's
/// cache is flushed before, if the allocator has a call for that: from outside, cached blocks look live. In a process of another language,
/// blocks that were live on its heap before are subtracted; those that the runtime allocates and frees meanwhile are not.
fn census(command: &mut Command, is_hosted: bool) -> Outcome {
    let mut target = Target::start(command.env("TRUTH_FLUSH", "1"));
    let before = if is_hosted { counted(target.pid()) } else { Ok((0, 0)) };
    let truth: Truth = target.go_to("round");
    let (bytes, blocks) = truth.live();
    let ((own_bytes, own_blocks), (live_bytes, live_blocks)) = match before.and_then(|own| Ok((own, counted(target.pid())?))) {
        Ok(both) => both,
        Err(why) => return Outcome::NotOffered(why),
    };
    let (live_bytes, live_blocks) = (live_bytes.saturating_sub(own_bytes), live_blocks.saturating_sub(own_blocks));
    // Also live are a few blocks of the C library itself, and cached blocks that no call flushes.
    let (less, more) = if is_hosted { (blocks / 50, blocks / 25) } else { (0, blocks / 50) };
    let text = format!("{live_blocks} blocks of {blocks}, {:.3} of their bytes", live_bytes as f64 / bytes as f64);
    let bytes_fit = live_bytes + bytes * less / blocks >= bytes && live_bytes <= bytes + bytes / 4 + 32 * blocks + (64 << 10);
    let blocks_fit = live_blocks == 0 || (blocks - less..blocks + more + 64).contains(&live_blocks);
    if bytes_fit && blocks_fit { Outcome::Good(text) } else { Outcome::Wrong(text) }
}

/// Whether the cells of a row are filled: all rows', or in `PLACES` is a part of its name.
fn is_wanted(name: &str) -> bool {
    std::env::var("PLACES").map_or(true, |parts| parts.split(';').any(|part| name.contains(part)))
}

/// Fills a cell of the table. What the program or the recording fails with is wrong there, and the next cells are filled.
fn cell(place: &str, column: &str, outcome: impl FnOnce() -> Outcome) -> bool {
    let outcome = catch_unwind(AssertUnwindSafe(outcome))
        .unwrap_or_else(|why| Outcome::Wrong(why.downcast::<String>().map_or_else(|_| "it failed: see the log".to_owned(), |text| *text)));
    let (mark, text) = match outcome {
        Outcome::Good(text) => ("good", text),
        Outcome::NotOffered(text) => ("none", text),
        Outcome::Wrong(text) => ("wrong", text),
    };
    println!("@@cell\t{place}\t{column}\t{mark}\t{}", text.replace(['\n', '\t'], " "));
    mark != "wrong"
}

#[test]
#[ignore = "fetches packages of other suites: make allocator-matrix"]
fn every_call_site_is_recorded_and_counted() {
    if bpf().is_none() {
        return;
    }
    let mut all = true;
    for place in places::all().iter().filter(|place| is_wanted(&place.name)) {
        let [calls, threads, rounds] = PROGRAMS.map(|program| move || place.command(program));
        all &= cell(&place.name, "exact", || exact(&mut calls(), "done"));
        all &= cell(&place.name, "threads", || exact(&mut threads(), "done"));
        all &= cell(&place.name, "governed", || governed(&mut rounds()));
        all &= cell(&place.name, "sampled", || sampled(&mut rounds(), false));
        all &= cell(&place.name, "census", || census(&mut rounds(), false));
    }
    for mut language in languages::all().into_iter().filter(|language| is_wanted(&language.name)) {
        let name = &language.name;
        all &= cell(name, "exact", || exact(&mut language.exact, "done"));
        if let Some(threads) = &mut language.threads {
            all &= cell(name, "threads", || exact(threads, "done"));
        }
        if let Some(rounds) = &mut language.rounds {
            all &= cell(name, "census", || census(rounds, language.is_hosted));
            all &= cell(name, "governed", || governed(rounds));
            all &= cell(name, "sampled", || sampled(rounds, language.is_hosted));
        }
    }
    assert!(all, "see the cells marked wrong");
}
