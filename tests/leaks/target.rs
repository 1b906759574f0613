//! The truth program, and the evaluation of scans of it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use fragprof::capture::registers::ThreadRegisters;
use fragprof::census::{LayoutCache, LiveMemory};
use fragprof::process::Process;
use fragprof::retention::scans::{Plan, ScanResult, scan};
use fragprof::units::Pid;

use crate::support::build::output_dir;

/// Compiles a program of this directory; `name` distinguishes its variants.
pub fn build(compiler: &str, source: &str, flags: &[&str], name: &str) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/leaks").join(source);
    let program = output_dir().join(format!("leaks-{name}"));
    let written = |path: &Path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
    if written(&program).is_none_or(|built| Some(built) < written(&source)) {
        // Tests of one process may build the same program at once.
        let unfinished = output_dir().join(format!("leaks-{name}.{}.{:?}", std::process::id(), std::thread::current().id()));
        let built = Command::new(compiler).args(["-O2", "-g", "-pthread", "-o"]).arg(&unfinished).arg(source).args(flags).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        std::fs::rename(unfinished, &program).unwrap();
    }
    program
}

/// A running truth program.
pub struct Target {
    child: Child,
    /// Closing it ends the program.
    _input: ChildStdin,
    output: BufReader<ChildStdout>,
    truth: PathBuf,
    _directory: tempfile::TempDir,
}

impl Target {
    /// Starts it; `churn`: the number of threads, and thousands of operations per second of each.
    pub fn start(mut command: Command, churn: Option<(u32, u32)>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let truth = directory.path().join("truth");
        command.arg(&truth);
        if let Some((threads, kops)) = churn {
            command.arg(threads.to_string()).arg(kops.to_string());
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut target = Self { child, _input: input, output, truth, _directory: directory };
        assert_eq!(target.hear(), "ready");
        target
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Scans it.
    pub fn scan(&self, looks: u32, interval: Duration) -> ScanResult {
        let memory = LiveMemory::open(Process::open(Pid(self.pid())).unwrap()).unwrap();
        let plan = Plan { looks, interval, ..Plan::default() };
        let registers = ThreadRegisters::of(Pid(self.pid())).unwrap();
        scan(&memory, (self.pid(), "truth"), plan, Some(&|| registers.read()), &mut LayoutCache::default()).unwrap()
    }

    /// The blocks that it lists: address and kind.
    pub fn truth(&self) -> BTreeMap<u64, String> {
        read_truth(&self.truth)
    }

    /// The number of blocks found of each kind, and of all that exist; blocks that the program does not list are "not known".
    pub fn judge(&self, seen: &ScanResult) -> Judged {
        let truth = self.truth();
        let mut judged = Judged::default();
        for kind in truth.values() {
            judged.0.entry(kind.clone()).or_default().1 += 1;
        }
        for (_, one) in seen.candidates.left() {
            // musl places blocks at varying offsets within their slots.
            let known = truth.range(one.range()).next().map_or("not known", |(_, kind)| kind.as_str());
            judged.0.entry(known.to_owned()).or_default().0 += 1;
        }
        judged
    }
}

/// The list that the program writes.
pub fn read_truth(path: &Path) -> BTreeMap<u64, String> {
    let text = std::fs::read_to_string(path).unwrap();
    let line = |line: &str| line.split_once(' ').map(|(addr, kind)| (u64::from_str_radix(addr, 16).unwrap(), kind.to_owned()));
    text.lines().filter_map(line).collect()
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Blocks found and blocks there are, by kind.
#[derive(Debug, Default)]
pub struct Judged(pub BTreeMap<String, (u64, u64)>);

impl Judged {
    /// Found and planted blocks of the kinds whose names begin with this prefix.
    pub fn of(&self, prefix: &str) -> (u64, u64) {
        let kinds = self.0.iter().filter(|(kind, _)| kind.starts_with(prefix));
        kinds.fold((0, 0), |sum, (_, (found, all))| (sum.0 + found, sum.1 + all))
    }

    /// Blocks found that are in use and pointed to.
    pub fn wrong(&self) -> Vec<(&str, u64)> {
        let is_wrong = |kind: &str| !kind.starts_with("leak-") && !kind.starts_with("hidden-") && kind != "stale";
        self.0.iter().filter(|(kind, (found, _))| *found > 0 && is_wrong(kind)).map(|(kind, (found, _))| (kind.as_str(), *found)).collect()
    }
}
