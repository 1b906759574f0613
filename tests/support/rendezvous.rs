//! The test's side of the rendezvous of `truth.h`: a unix socket on which the program sends its ledger and waits for a byte.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use rustix::event::{PollFd, PollFlags, poll};
use tempfile::TempDir;

use super::LIMIT;
use super::process::Process;
use super::truth::Truth;

/// A socket for one program, which may connect again after an exec.
pub struct Rendezvous {
    dir: TempDir,
    listener: UnixListener,
    stream: Option<BufReader<UnixStream>>,
}

impl Rendezvous {
    /// Opens the socket.
    pub fn new() -> Self {
        let dir = TempDir::new().expect("a temporary directory can be created");
        let listener = UnixListener::bind(dir.path().join("truth")).expect("the socket can be bound");
        Self { dir, listener, stream: None }
    }

    /// Path of the socket, for `TRUTH_SOCKET`.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("truth")
    }

    fn accept(&self, of: &Process) -> BufReader<UnixStream> {
        let timeout = LIMIT.try_into().expect("limits are short");
        let ready = poll(&mut [PollFd::new(&self.listener, PollFlags::IN)], Some(&timeout)).expect("poll works");
        assert!(ready > 0, "the program did not reach the rendezvous; output:\n{}\n{}", of.out, of.err);
        let (stream, _) = self.listener.accept().expect("the connection can be accepted");
        stream.set_read_timeout(Some(LIMIT)).expect("a timeout can be set");
        BufReader::new(stream)
    }

    /// Waits for the program to send its ledger in `phase`. `of` is the process whose output explains a failure.
    pub fn expect(&mut self, phase: &str, of: &Process) -> Truth {
        loop {
            let mut stream = self.stream.take().unwrap_or_else(|| self.accept(of));
            let mut line = String::new();
            match stream.read_line(&mut line) {
                // An exec closed the connection: the new image opens its own.
                Ok(0) => continue,
                Ok(_) => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => continue,
                Err(e) => panic!("no line of phase {phase}: {e}; the program's output:\n{}\n{}", of.out, of.err),
            }
            self.stream = Some(stream);
            let truth = Truth::parse(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
            assert_eq!(truth.phase, phase, "the program is in another phase");
            return truth;
        }
    }

    /// Lets the program continue.
    pub fn go(&mut self) {
        self.say(b'g');
    }

    /// Lets it continue with a byte that has a meaning to it.
    pub fn say(&mut self, byte: u8) {
        let stream = self.stream.as_mut().expect("a program has reached the rendezvous");
        stream.get_mut().write_all(&[byte]).expect("the program listens");
    }
}

/// A test program started by the test itself, to attach to.
pub struct Target {
    /// The process.
    pub process: Process,
    /// Its rendezvous.
    pub rendezvous: Rendezvous,
}

impl Target {
    /// Starts `command` and waits until it is ready.
    pub fn start(command: &mut Command) -> Self {
        let mut rendezvous = Rendezvous::new();
        let process = Process::start(command.env("TRUTH_SOCKET", rendezvous.path()));
        rendezvous.expect("ready", &process);
        Self { process, rendezvous }
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Lets it continue, and waits for its ledger in `phase`.
    pub fn go_to(&mut self, phase: &str) -> Truth {
        self.rendezvous.go();
        self.rendezvous.expect(phase, &self.process)
    }
}
