//! Every large block of a busy process is recorded: compared with a program that keeps its own ledger of them.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{ChildStdin, Command};
use std::time::{Duration, Instant};

use fragprof::probe::features::Attach;
use fragprof::profile::{Profile, ValueKind};
use fragprof::session::tier::windows::{Governed, Options, Status};
use fragprof::units::Pid;
use rustix::process::Signal;

use super::harm::changed_code_bytes;
use super::{built, output};
use crate::support::build::LIB_DIR;
use crate::support::process::{Process, run, wait_until};
use crate::support::{LIMIT, bpf, serial};

/// Large enough for the program's large blocks in these tests, and too small for its small pairs.
const BUDGET: f64 = 0.5;
/// Number of large operations of a test.
const OPERATIONS: u64 = 30_000;

/// The C library and its loader.
const LIBRARY: &str = "libc.so.6";
const LOADER: &str = "ld-linux-x86-64.so.2";

/// Blocks and bytes by site.
type BySite = BTreeMap<String, (u64, u64)>;

/// `large` and its commands.
struct Program {
    process: Process,
    input: ChildStdin,
    said: usize,
}

impl Program {
    fn start(churn: u32) -> Self {
        Self::start_as(Command::new(built("large")).arg(churn.to_string()))
    }

    fn start_as(command: &mut Command) -> Self {
        let mut process = Process::start_piped(command);
        let input = process.input();
        let mut program = Self { process, input, said: 0 };
        assert_eq!(program.line().as_deref(), Some("ready"), "{}", program.process.err);
        program
    }

    fn pid(&self) -> Pid {
        Pid(self.process.pid())
    }

    fn line(&mut self) -> Option<String> {
        let line = self.process.out.nth(self.said, LIMIT)?;
        self.said += 1;
        Some(line)
    }

    fn send(&mut self, order: &str) {
        self.input.write_all(format!("{order}\n").as_bytes()).unwrap();
    }

    /// Sends a command and steps the governor until it is done. Returns the program's output.
    fn order(&mut self, governed: &mut Governed, order: &str) -> Vec<String> {
        self.send(order);
        let mut lines = Vec::new();
        let deadline = Instant::now() + LIMIT;
        loop {
            assert!(Instant::now() < deadline, "{order} takes too long: {lines:?}");
            governed.step(Duration::from_millis(10));
            while let Some(line) = self.process.out.nth(self.said, Duration::ZERO) {
                self.said += 1;
                if line == "done" {
                    return lines;
                }
                lines.push(line);
            }
        }
    }

    /// Its own ledger, and its small pairs so far.
    fn truth(&mut self, governed: &mut Governed) -> (BySite, u64) {
        let (mut sites, mut pairs) = (BySite::new(), 0);
        for line in self.order(governed, "truth") {
            let fields: Vec<&str> = line.split(' ').collect();
            match fields[..] {
                ["small", count] => pairs = count.parse().unwrap(),
                [_, "0", "0"] => {}
                [site, blocks, bytes] => drop(sites.insert(site.to_owned(), (blocks.parse().unwrap(), bytes.parse().unwrap()))),
                _ => panic!("{line}"),
            }
        }
        (sites, pairs)
    }
}

fn status(governed: &Governed) -> Status {
    governed.status().remove(0)
}

fn step_until(governed: &mut Governed, what: &str, condition: impl Fn(&Status) -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition(&status(governed)) {
        assert!(Instant::now() < deadline, "timed out waiting: {what}: {:?}", governed.status());
        governed.step(Duration::from_millis(20));
    }
}

fn governor(method: Option<Attach>) -> Governed {
    Governed::new(Options { own_census: false, method, ..Options::default() }).unwrap()
}

/// Live large blocks in a profile, by site.
fn large_of(profile: &Profile) -> BySite {
    let mut sites = BySite::new();
    for stack in profile.stacks().iter().filter(|stack| stack.values.get(ValueKind::LargeObjects) > 0) {
        let names: Vec<&str> = profile.frames_of(stack).map(|frame| &*frame.function).collect();
        // The C library's own blocks are buffers of standard input and output.
        let Some(site) = names.iter().find(|name| name.starts_with("site_")) else { continue };
        let of = sites.entry((*site).to_owned()).or_default();
        *of = (of.0 + stack.values.get(ValueKind::LargeObjects), of.1 + stack.values.get(ValueKind::LargeSpace));
    }
    sites
}

/// Steps until the profile equals the program's ledger, because records are read a little later; checks both at the end.
fn compare_with_ledger(program: &mut Program, governed: &mut Governed) -> u64 {
    let (truth, pairs) = program.truth(governed);
    assert!(!truth.is_empty());
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        governed.step(Duration::from_millis(50));
        let status = status(governed);
        assert!(status.large.kept, "the probes were detached: {status:?}");
        let profile = governed.profile(None);
        let reported = large_of(&profile);
        if reported == truth {
            return pairs;
        }
        assert!(Instant::now() < deadline, "reported:\n{reported:#?}\nand the truth is\n{truth:#?}\n{:?}", profile.meta.losses);
    }
}

fn every_large_block_is_known(method: Option<Attach>) {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut program = Program::start(1);
    let mut governed = governor(method);
    governed.watch(program.pid(), BUDGET).unwrap();
    governed.wait_for_tables(Duration::from_secs(20));
    step_until(&mut governed, "the trial is over", |status| status.large.kept);
    program.order(&mut governed, "forget");
    let pairs_before = program.truth(&mut governed).1;
    let hits_before = status(&governed).large.hits;
    program.order(&mut governed, &format!("work {OPERATIONS}"));
    let pairs = compare_with_ledger(&mut program, &mut governed) - pairs_before;
    let hits = status(&governed).large.hits - hits_before;
    println!("{pairs} small pairs, {OPERATIONS} large operations, {hits} hits");
    // Resizing a block hits two or three probes, any other operation one.
    assert!((OPERATIONS / 2..4 * OPERATIONS).contains(&hits), "{hits} hits of {OPERATIONS} operations and {pairs} small pairs");
    assert!(!status(&governed).full);
    let profile = governed.finish();
    let of = profile.meta.governed[0].large_blocks.clone().unwrap();
    assert_eq!((of.state.as_str(), of.times_left, of.dropped), ("kept", 0, 0), "{of:?}");
    assert!(of.freed_from_before > 0 && of.since_s.is_some(), "{of:?}");
    assert_eq!(of.live_bytes, large_of(&profile).values().map(|(_, bytes)| bytes).sum::<u64>());
    wait_until("no probe is left", || changed_code_bytes(program.process.pid()) == 0);
    assert!(program.process.is_running());
}

#[test]
fn every_large_block_of_a_busy_process_is_known_by_its_site() {
    every_large_block_is_known(None);
}

#[test]
fn large_blocks_are_tracked_on_kernels_without_sessions_multi_probes_and_cookies() {
    for method in [Attach::Multi, Attach::PerfEvents, Attach::ByAddress] {
        every_large_block_is_known(Some(method));
    }
}

#[test]
fn an_unknown_build_of_glibc_is_examined_while_windows_continue_and_is_known_from_then_on() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // Appended bytes turn this machine's build into another file that behaves the same.
    let (folder, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for name in [LOADER, LIBRARY] {
        std::fs::copy(Path::new(LIB_DIR).join(name), folder.path().join(name)).unwrap();
    }
    std::fs::OpenOptions::new().append(true).open(folder.path().join(LIBRARY)).unwrap().write_all(b"another").unwrap();
    let mut command = Command::new(folder.path().join(LOADER));
    let mut program = Program::start_as(command.arg("--library-path").arg(folder.path()).arg(built("large")).arg("1"));
    let of = |governed: &mut Governed| governed.profile(None).meta.governed[0].large_blocks.clone().unwrap();
    for is_known in [false, true] {
        let mut governed =
            Governed::new(Options { own_census: false, sites_store: Some(store.path().to_owned()), ..Options::default() }).unwrap();
        governed.watch(program.pid(), BUDGET).unwrap();
        let said = of(&mut governed);
        assert_eq!(!said.reason.contains("is being examined"), is_known, "{said:?}");
        governed.wait_for_tables(Duration::from_secs(20));
        step_until(&mut governed, "the trial is over", |status| status.large.kept);
        assert_eq!(std::fs::read_dir(store.path().join("large-sites")).unwrap().count(), 1);
        program.order(&mut governed, "forget");
        program.order(&mut governed, "work 2000");
        compare_with_ledger(&mut program, &mut governed);
    }
}

#[test]
fn too_frequent_large_blocks_are_no_longer_tracked_at_a_bounded_cost_which_is_reported() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut program = Program::start(0);
    let mut governed = governor(None);
    governed.watch(program.pid(), 0.01).unwrap();
    governed.wait_for_tables(Duration::from_secs(20));
    program.order(&mut governed, "flood 3000");
    step_until(&mut governed, "the probes are detached", |status| status.large.times_left > 0);
    let status = status(&governed);
    assert!(!status.large.kept && status.large.live_bytes.is_none(), "{status:?}");
    // A trial may cost a fiftieth of a second, and the flood keeps hitting probes until the kernel has removed them, which waits for an RCU
    // grace period: 30 to 120 ms where this was measured.
    assert!(status.large.lost_s < 0.3, "a tenth of the flood: {status:?}");
    let profile = governed.profile(None);
    let of = profile.meta.governed[0].large_blocks.clone().unwrap();
    assert!(of.state == "left" && !of.reason.is_empty() && of.since_s.is_none(), "{of:?}");
    assert!(!profile.meta.kinds.contains(ValueKind::LargeSpace));
    drop(governed);
    wait_until("no probe is left", || changed_code_bytes(program.process.pid()) == 0);
}

#[test]
fn forks_execs_and_the_end_leave_nothing_behind_and_an_exec_begins_anew() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut program = Program::start(1);
    let mut governed = governor(None);
    governed.watch(program.pid(), BUDGET).unwrap();
    governed.wait_for_tables(Duration::from_secs(20));
    step_until(&mut governed, "the trial is over", |status| status.large.kept);
    program.order(&mut governed, "forget");
    for _ in 0..5 {
        program.order(&mut governed, "fork");
    }
    program.order(&mut governed, "work 1000");
    compare_with_ledger(&mut program, &mut governed);
    let (mut truth, _) = program.truth(&mut governed);
    let hits_before = status(&governed).large.hits;
    program.send("exec");
    let deadline = Instant::now() + LIMIT;
    while program.process.out.nth(program.said, Duration::ZERO).is_none() {
        assert!(Instant::now() < deadline);
        governed.step(Duration::from_millis(10));
    }
    assert_eq!(program.line().as_deref(), Some("ready"));
    // Until the exec is noticed, the status is that of the old image, with all its hits.
    step_until(&mut governed, "the trial in the new image is over", |status| status.large.kept && status.large.hits < hits_before);
    program.order(&mut governed, "work 1000");
    // The old image is in the profile too, in its last state.
    for (site, (blocks, bytes)) in program.truth(&mut governed).0 {
        let of = truth.entry(site).or_default();
        *of = (of.0 + blocks, of.1 + bytes);
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        let reported = large_of(&governed.profile(None));
        if reported == truth {
            break;
        }
        assert!(Instant::now() < deadline, "reported:\n{reported:#?}\nand the truth is\n{truth:#?}");
        governed.step(Duration::from_millis(50));
    }
    program.process.signal(Signal::KILL);
    program.process.wait(LIMIT);
    let deadline = Instant::now() + LIMIT;
    while governed.step(Duration::from_millis(50)) {
        assert!(Instant::now() < deadline, "its end was not noticed");
    }
}

#[test]
fn no_large_blocks_are_tracked_if_switched_off_or_if_another_allocator_serves_malloc() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let program = Program::start(1);
    let mut off = Governed::new(Options { own_census: false, large_blocks: false, ..Options::default() }).unwrap();
    off.watch(program.pid(), BUDGET).unwrap();
    step_until(&mut off, "a window", |status| status.windows > 0);
    let of = |governed: &mut Governed| governed.profile(None).meta.governed[0].large_blocks.clone().unwrap();
    assert_eq!((of(&mut off).state.as_str(), of(&mut off).trials), ("none", 0));
    drop(off);
    let wrapper = output("governed-ledger.so", |fresh| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/governed/ledger.c");
        let done = run(Command::new("cc").args(["-O2", "-g", "-fno-builtin", "-shared", "-fPIC", "-o"]).arg(fresh).arg(&source));
        assert!(done.status.success(), "{}", done.err);
    });
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 26).unwrap();
    let mut behind = Command::new(built("large"));
    let behind = Process::start_piped(behind.arg("1").env("LD_PRELOAD", wrapper).env("LEDGER_FILE", file.path()));
    assert!(behind.out.wait_for(LIMIT, |line| line == "ready").is_some(), "{}", behind.err);
    let mut governed = governor(None);
    governed.watch(Pid(behind.pid()), BUDGET).unwrap();
    step_until(&mut governed, "a window", |status| status.windows > 0);
    let said = of(&mut governed);
    assert!(said.state == "none" && said.trials == 0 && said.reason.contains("malloc"), "{said:?}");
}
