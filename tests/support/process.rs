//! Child processes of the tests: their output is collected as it is written, their end is awaited with a timeout, nothing is left behind.

use std::fmt;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use super::LIMIT;

/// Lines of a stream so far.
#[derive(Clone, Default)]
pub struct Lines(Arc<Shared>);

#[derive(Default)]
struct Shared {
    said: Mutex<Said>,
    more: Condvar,
}

#[derive(Default)]
struct Said {
    lines: Vec<String>,
    ended: bool,
}

impl Lines {
    fn collect(stream: impl Read + Send + 'static) -> Self {
        let lines = Self::default();
        let sink = lines.clone();
        let read = move || {
            for line in BufReader::new(stream).split(b'\n').map_while(Result::ok) {
                sink.said().lines.push(String::from_utf8_lossy(&line).into_owned());
                sink.0.more.notify_all();
            }
            sink.said().ended = true;
            sink.0.more.notify_all();
        };
        std::thread::Builder::new().name("test-lines".into()).spawn(read).expect("a thread can be started");
        lines
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.0.said.lock().expect("no panic while locked")
    }

    /// Waits for a line that satisfies `wanted`. `None`: the stream ended, or the limit passed, without one.
    pub fn wait_for(&self, limit: Duration, wanted: impl Fn(&str) -> bool) -> Option<String> {
        let deadline = Instant::now() + limit;
        let mut said = self.said();
        loop {
            if let Some(line) = said.lines.iter().find(|line| wanted(line)) {
                return Some(line.clone());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if said.ended || left.is_zero() {
                return None;
            }
            said = self.0.more.wait_timeout(said, left).expect("no panic while locked").0;
        }
    }

    /// Waits for the line with this number, from 0. `None`: the stream ended, or the limit passed, before it.
    pub fn nth(&self, number: usize, limit: Duration) -> Option<String> {
        let waited = self.0.more.wait_timeout_while(self.said(), limit, |said| said.lines.len() <= number && !said.ended);
        waited.expect("no panic while locked").0.lines.get(number).cloned()
    }

    /// Waits for the stream's end and returns all of it.
    pub fn all(&self) -> String {
        let waited = self.0.more.wait_timeout_while(self.said(), LIMIT, |said| !said.ended);
        waited.expect("no panic while locked").0.lines.join("\n")
    }
}

impl fmt::Display for Lines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.said().lines.join("\n"))
    }
}

/// A child whose output is collected, killed when dropped.
pub struct Process {
    child: Child,
    name: String,
    /// Standard output.
    pub out: Lines,
    /// Standard error.
    pub err: Lines,
}

impl Process {
    /// Starts `command` without standard input.
    pub fn start(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::null());
        Self::start_with_input(command, name)
    }

    /// Starts `command` with a pipe as standard input, which stays open until [`Process::input`] is taken and dropped.
    pub fn start_piped(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        command.stdin(Stdio::piped());
        Self::start_with_input(command, name)
    }

    /// Starts `command` with the standard input that is already set.
    pub fn start_fed(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        Self::start_with_input(command, name)
    }

    fn start_with_input(command: &mut Command, name: String) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|e| panic!("cannot start {name}: {e}"));
        let out = Lines::collect(child.stdout.take().expect("stdout is piped"));
        let err = Lines::collect(child.stderr.take().expect("stderr is piped"));
        Self { child, name, out, err }
    }

    /// The write end of the child's standard input.
    pub fn input(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().expect("started with a piped standard input, taken once")
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap_or_else(|e| panic!("cannot signal {}: {e}", self.name));
    }

    /// Waits for the end. If the child does not end within `limit`, the test fails with its output.
    pub fn wait(&mut self, limit: Duration) -> ExitStatus {
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty());
        let timeout = limit.try_into().expect("limits are short");
        let ended = match &pidfd {
            Ok(fd) => poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&timeout)).expect("poll works") > 0,
            // Already reaped.
            Err(_) => true,
        };
        assert!(ended, "{} did not end within {limit:?}; output:\n{}\n{}", self.name, self.out, self.err);
        self.child.wait().expect("a child can be waited for")
    }

    /// Waits until the child is dead but not reaped: a zombie.
    pub fn wait_until_zombie(&self) {
        let fd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty()).expect("the child exists");
        let timeout = LIMIT.try_into().expect("limits are short");
        assert!(poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).expect("poll works") > 0, "{} is still alive", self.name);
    }

    /// Whether the child has not ended yet.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be polled").is_none()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only for a child that is already reaped, which is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A finished command: exit status, standard output, standard error.
pub struct Done {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output.
    pub out: String,
    /// Standard error.
    pub err: String,
}

/// Runs `command` to its end within [`LIMIT`].
pub fn run(command: &mut Command) -> Done {
    let mut process = Process::start(command);
    let status = process.wait(LIMIT);
    Done { status, out: process.out.all(), err: process.err.all() }
}

/// Checks `condition` until it holds; fails with `what` after [`LIMIT`]. For conditions without a notification, such as the code of
/// another process: checked every few milliseconds, later less often, because a check may cost another process some milliseconds.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    let mut pause = Duration::from_millis(2);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out after {LIMIT:?}: {what}");
        std::thread::park_timeout(pause);
        pause = (pause * 5 / 4).min(Duration::from_millis(50));
    }
}
