//! A target that takes commands on its standard input and answers with its allocator's own account.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use fragprof::census::{LayoutCache, Level, LiveMemory, Options, Pace, Taken, take};
use fragprof::process::Process;
use fragprof::units::Pid;
use serde_json::Value;

/// Compiles a program of this directory once per test run; returns its path.
pub fn build(source: &str, compiler: &str, flags: &[&str]) -> PathBuf {
    let source_path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census").join(source);
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("census");
    std::fs::create_dir_all(&directory).unwrap();
    let tag: String = format!("{compiler}{}", flags.concat()).chars().filter(char::is_ascii_alphanumeric).collect();
    let program = directory.join(format!("{}-{tag}", source.replace('.', "_")));
    let fresh = |path: &Path| std::fs::metadata(path).and_then(|m| m.modified()).ok();
    if fresh(&program).is_some_and(|built| fresh(&source_path).is_some_and(|written| built > written)) {
        return program;
    }
    let unfinished = directory.join(format!("{}.{}", program.file_name().unwrap().to_string_lossy(), rand()));
    let status = Command::new(compiler).args(["-O1", "-g", "-w", "-o"]).arg(&unfinished).arg(&source_path).args(flags).status().unwrap();
    assert!(status.success(), "{compiler} cannot build {source}");
    std::fs::rename(&unfinished, &program).unwrap();
    program
}

fn rand() -> u128 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos()
}

/// A running target.
pub struct Target {
    pub child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Target {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output }
    }

    /// As [`Target::start`], with pages of 4 KiB only: all of a huge page is resident, also the part that the allocator never
    /// allocated.
    pub fn start_on_small_pages(command: &mut Command) -> Self {
        // SAFETY: five numbers, as prctl(2) requires.
        let refuse_huge_pages = || match unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        };
        // SAFETY: between fork and exec nothing is done but one system call.
        unsafe { command.pre_exec(refuse_huge_pages) };
        Self::start(command)
    }

    /// Runs a scenario or `stat`, `trim`, and returns the target's account.
    pub fn tell(&mut self, command: &str) -> Value {
        writeln!(self.input, "{command}").unwrap();
        self.hear()
    }

    /// The target's next line.
    pub fn hear(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn memory(&self) -> LiveMemory {
        LiveMemory::open(Process::open(Pid(self.pid())).unwrap()).unwrap()
    }

    pub fn census(&self, level: Level) -> Taken {
        take(
            &self.memory(),
            self.pid(),
            "target",
            Options { level, pace: Pace::default(), with_not_malloc: true },
            &mut LayoutCache::default(),
        )
        .unwrap()
    }

    /// Anonymous resident bytes, as the kernel counts them.
    pub fn anonymous_bytes(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let line = text.lines().find(|line| line.starts_with("Anonymous:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
