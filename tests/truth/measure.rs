//! Runs the programs with the ledger, records them, and reads fragprof's reports.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::ledger::{Entry, Ledgers};
use super::programs::Program;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::fragprof;

/// How long a run of a program may take, with every call recorded.
pub const RUN_LIMIT: Duration = Duration::from_secs(200);

/// A program with its files.
pub struct Prepared {
    /// The program.
    pub program: &'static Program,
    /// Rounds if every call is recorded.
    pub rounds: u64,
    dir: TempDir,
}

/// A running program, with its load.
pub struct Running {
    /// The program, or the recorder that started it.
    pub process: Process,
    /// The ledgers of the program and its children.
    pub ledgers: Ledgers,
}

impl Drop for Running {
    fn drop(&mut self) {
        // A server that the recorder started may outlive it. Ends only processes that have a ledger of this run.
        for entry in self.ledgers.all().iter().filter(|entry| entry.is_alive()) {
            let is_same = fs::read_link(format!("/proc/{}/exe", entry.pid)).is_ok_and(|exe| exe == Path::new(&entry.exe));
            if is_same && let Some(pid) = Pid::from_raw(entry.pid as i32) {
                let _ = kill_process(pid, Signal::KILL);
            }
        }
    }
}

/// Directory with the in-process sampler's library.
fn sampler() -> &'static Path {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = TempDir::new().expect("a temporary directory can be created");
        let done = run(fragprof().args(["run", "--install"]).arg(dir.path()));
        assert!(done.status.success(), "{}", done.err);
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("its mode can be set");
        dir
    });
    dir.path()
}

/// The library of `sampler()` for a program.
fn sampler_for(program: &Program) -> std::path::PathBuf {
    let is_jemalloc = program.allocator.contains("jemalloc") || program.what.contains("C, jemalloc");
    sampler().join(if is_jemalloc { "libfragprof_sampler_jemalloc.so" } else { "libfragprof_sampler.so" })
}

/// How a program is started: where it stops, and whether the sampler is preloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At once.
    AtOnce,
    /// At once; it stops at the next call after this many allocations.
    UntilAllocation(u64),
    /// Stopped before its main until it is resumed.
    Kept,
    /// As above, with the sampler preloaded before the ledger.
    KeptAndSampled,
}

impl Prepared {
    /// Creates a working directory, and the program's files in it.
    pub fn new(program: &'static Program) -> Result<Self, String> {
        let dir = TempDir::new().expect("a temporary directory can be created");
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("its mode can be set");
        let prepared = Self { program, rounds: program.rounds, dir };
        prepared.shell(program.setup)?;
        Ok(prepared)
    }

    /// Divides the number of rounds for recordings of every call.
    pub fn shorten(&mut self, times: u64) {
        self.rounds = (self.rounds / times).max(1);
    }

    fn fill(&self, text: &str, rounds: u64) -> String {
        Program::fill(text, &self.dir.path().display().to_string(), rounds)
    }

    fn shell(&self, text: &str) -> Result<(), String> {
        if text.is_empty() {
            return Ok(());
        }
        let mut command = Command::new("sh");
        command.args(["-ec", &self.fill(text, 0)]).current_dir(self.dir.path());
        let mut process = Process::start(&mut command);
        let status = process.wait(RUN_LIMIT);
        if status.success() { Ok(()) } else { Err(format!("its set-up failed with {status}: {}", process.err.all())) }
    }

    /// The words of its command.
    fn words(&self, rounds: u64) -> Vec<String> {
        self.program.command.iter().map(|word| self.fill(word, rounds)).collect()
    }

    fn start_process(&self, command: &mut Command) -> Process {
        for pair in self.program.environment {
            let (name, value) = pair.split_once('=').expect("entries of the table are NAME=value");
            command.env(name, value);
        }
        command.current_dir(self.dir.path());
        let input = if self.program.input.is_empty() { None } else { File::open(self.dir.path().join(self.program.input)).ok() };
        Process::start_fed(command.stdin(input.map_or_else(Stdio::null, Stdio::from)))
    }

    /// Starts the program by itself.
    pub fn start(&self, rounds: u64, start: Start) -> Result<Running, String> {
        self.shell(self.program.before)?;
        let words = self.words(rounds);
        let ledgers = Ledgers::new();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        let sampler = (start == Start::KeptAndSampled).then(|| sampler_for(self.program));
        let is_kept = matches!(start, Start::Kept | Start::KeptAndSampled);
        ledgers.prepare(&mut command, sampler.as_deref(), self.program.allocator, is_kept);
        if let Start::UntilAllocation(number) = start {
            command.env("LEDGER_HOLD_AT", number.to_string());
        }
        command.env("FRAGPROF_SAMPLE_BYTES", "65536");
        Ok(Running { process: self.start_process(&mut command), ledgers })
    }

    /// Starts `fragprof record … -- PROGRAM`.
    pub fn record(&self, rounds: u64, file: &Path) -> Result<Running, String> {
        self.shell(self.program.before)?;
        let ledgers = Ledgers::new();
        let mut command = fragprof();
        command.args(["record", "--duration", "600s", "-o"]).arg(file).arg("--").args(self.words(rounds));
        ledgers.prepare(&mut command, None, self.program.allocator, false);
        Ok(Running { process: self.start_process(&mut command), ledgers })
    }

    /// Starts the load of a server.
    pub fn begin_load(&self, rounds: u64) -> Option<Process> {
        let load = self.program.load;
        let mut command = Command::new("sh");
        command.args(["-c", &self.fill(load, rounds)]).current_dir(self.dir.path());
        (!load.is_empty()).then(|| Process::start(&mut command))
    }

    /// Waits for the program's end; a server is ended after its load.
    pub fn drive(&self, running: &mut Running, rounds: u64) {
        if let Some(mut load) = self.begin_load(rounds) {
            load.wait(RUN_LIMIT);
            let server = running.ledgers.all().into_iter().next();
            if let Some(pid) = server.and_then(|entry| Pid::from_raw(entry.pid as i32)) {
                let _ = kill_process(pid, Signal::TERM);
            }
        }
        running.process.wait(RUN_LIMIT);
    }
}

/// `fragprof report FILE --json`.
pub fn report(file: &Path) -> Result<Value, String> {
    let done = run(fragprof().arg("report").arg(file).args(["--by", "allocated", "--json"]));
    if !done.status.success() {
        return Err(format!("fragprof report failed: {}", done.err));
    }
    serde_json::from_str(&done.out).map_err(|e| e.to_string())
}

/// Waits until a recorder reports that it records.
pub fn wait_until_recording(recorder: &Process) -> Result<(), String> {
    let said = recorder.err.wait_for(Duration::from_secs(60), |line| line.to_lowercase().contains("recording"));
    said.map(|_| ()).ok_or_else(|| format!("fragprof does not record: {}", recorder.err))
}

/// Waits for a condition on a ledger while its process is alive.
pub fn wait_while_alive(entry: &Entry, what: &str, mut condition: impl FnMut() -> bool) -> Result<(), String> {
    let began = Instant::now();
    let mut holds = false;
    wait_until(what, || {
        holds = condition();
        holds || !entry.is_alive() || began.elapsed() > Duration::from_secs(55)
    });
    if holds { Ok(()) } else { Err(format!("{what}: did not happen before the program's end")) }
}
