//! Starting a command so that not even its first allocation is missed, nor that of a program it executes in its place.
//!
//! The child stops at its exec. From there to the program's entry point every mapping of code is a stop, at which the driver looks for
//! allocators and probes them before the dynamic linker goes on: constructors of libraries run before the entry point, and they
//! allocate. From the entry point on the child runs freely; only its signals pass through here, and its next exec begins all anew.
//!
//! ```text
//! fork → PTRACE_TRACEME → exec ─stop→ (mmap PROT_EXEC ─stop→ look)* → AT_ENTRY ─stop→ look → PTRACE_SEIZE, run ─exec stop─┐
//!                           ↑                                                                                           │
//!                           └───────────────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Tracing belongs to a thread, so one thread does all of it. If this process ends, however it ends, the kernel lets the child go on.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};

use crate::machine::stopped::{BREAKPOINT, BREAKPOINT_MASK, BREAKPOINT_PASSED_BYTES, Registers, peek, poke, ptrace, wait_for};
use crate::units::Pid;

/// Why a command could not be started under watch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program could not be executed at all.
    #[error("cannot run {program}: {source}")]
    Spawn {
        /// As given.
        program: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The thread that follows it could not be started.
    #[error("cannot start a thread to follow {program}: {source}")]
    Thread {
        /// As given.
        program: String,
        /// The system's reason.
        source: io::Error,
    },
    /// A step of following it to its entry point failed.
    #[error("cannot follow {program} to its entry point: {step}: {source}")]
    Trace {
        /// As given.
        program: String,
        /// What failed.
        step: &'static str,
        /// The system's reason.
        source: io::Error,
    },
    /// It ended before its entry point.
    #[error("{program} ended before it ran ({status}): is it complete, and are its libraries there?")]
    Ended {
        /// As given.
        program: String,
        /// How.
        status: ExitStatus,
    },
}

const SYS_MMAP: u64 = libc::SYS_mmap as u64;

/// A command that was started under watch.
pub struct Launched {
    pid: Pid,
    looks: Receiver<Look>,
    status: Arc<OnceLock<ExitStatus>>,
}

/// The child stands still: look at its code, then let it go on by dropping this.
pub struct Look {
    /// Whether this is the first look at a new image.
    pub new_image: bool,
    /// Whether this is the last stop of the image: it is about to run.
    pub at_entry: bool,
    _done: Sender<()>,
}

impl Launched {
    /// The command's process.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The stops that wait for a look.
    pub fn looks(&self) -> &Receiver<Look> {
        &self.looks
    }

    /// How it ended, once it has.
    pub fn status(&self) -> Option<ExitStatus> {
        self.status.get().copied()
    }
}

/// Starts the command. It stands still at its exec until the first [`Look`] is taken and dropped.
///
/// # Errors
/// [`LaunchError::Spawn`] if there is no such program or it may not be executed.
pub fn launch(command: &[OsString]) -> Result<Launched, LaunchError> {
    let program = command.first().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let command = command.to_vec();
    let (started, result) = sync_channel(1);
    let (stops, looks) = sync_channel(0);
    let status = Arc::<OnceLock<ExitStatus>>::default();
    let shared = Arc::clone(&status);
    let name = program.clone();
    std::thread::Builder::new()
        .name("fragprof-launch".into())
        .spawn(move || start_and_follow(&command, &name, &started, stops, &shared))
        .map_err(|source| LaunchError::Thread { program: program.clone(), source })?;
    let ended = || LaunchError::Thread { program: program.clone(), source: io::Error::other("it ended early") };
    let pid = result.recv().map_err(|_| ended())??;
    Ok(Launched { pid, looks, status })
}

/// The thread's whole life.
fn start_and_follow(
    command: &[OsString],
    program: &str,
    started: &SyncSender<Result<Pid, LaunchError>>,
    stops: SyncSender<Look>,
    status: &OnceLock<ExitStatus>,
) {
    let mut spawn = Command::new(command.first().map_or_else(Default::default, Clone::clone));
    spawn.args(command.iter().skip(1));
    // SAFETY: between fork and exec only an async-signal-safe system call is made.
    unsafe { spawn.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0, 0).map(drop)) };
    let mut child = match spawn.spawn() {
        Ok(child) => child,
        Err(source) => {
            // The caller waits for exactly this.
            drop(started.send(Err(LaunchError::Spawn { program: program.to_owned(), source })));
            return;
        }
    };
    let pid = child.id() as i32;
    drop(started.send(Ok(Pid(child.id()))));
    let mut look = |new_image, at_entry| {
        let (done, wait) = channel();
        // If nobody looks any more, the child just goes on.
        if stops.send(Look { new_image, at_entry, _done: done }).is_ok() {
            let _ = wait.recv();
        }
    };
    match trace(pid, program, &mut look) {
        Ok(ended) => {
            let _ = status.set(ended);
        }
        Err(LaunchError::Ended { status: ended, .. }) => {
            let _ = status.set(ended);
        }
        Err(error) => {
            tracing::warn!("{error}");
            if let Ok(ended) = child.wait() {
                let _ = status.set(ended);
            }
        }
    }
}

/// Follows the child until it ends.
fn trace(pid: i32, program: &str, look: &mut impl FnMut(bool, bool)) -> Result<ExitStatus, LaunchError> {
    let failed = |step: &'static str| {
        let program = program.to_owned();
        move |source| LaunchError::Trace { program, step, source }
    };
    let status = wait_for(pid).map_err(failed("wait for its exec"))?;
    if !libc::WIFSTOPPED(status) {
        return Ok(ExitStatus::from_raw(status));
    }
    ptrace(libc::PTRACE_SETOPTIONS, pid, 0, libc::PTRACE_O_TRACESYSGOOD as u64).map_err(failed("set trace options"))?;
    follow(pid, program, look)?;
    // Seized instead of traced from birth, so that stop signals work as without us. Stopped in between: an exec before it is seized would
    // not be seen.
    ptrace(libc::PTRACE_DETACH, pid, 0, libc::SIGSTOP as u64).map_err(failed("let it go"))?;
    let options = (libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC) as u64;
    let seized = ptrace(libc::PTRACE_SEIZE, pid, 0, options).map_err(failed("watch for its next exec"));
    // Also where that failed: it must not stand still for ever.
    let child = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound.into());
    let goes_on = child.and_then(|child| Ok(rustix::process::kill_process(child, rustix::process::Signal::CONT)?));
    seized?;
    goes_on.map_err(failed("continue it"))?;
    loop {
        let status = wait_for(pid).map_err(failed("wait for it"))?;
        if !libc::WIFSTOPPED(status) {
            return Ok(ExitStatus::from_raw(status));
        }
        match (libc::WSTOPSIG(status), status >> 16) {
            (_, libc::PTRACE_EVENT_EXEC) => {
                follow(pid, program, look)?;
                ptrace(libc::PTRACE_CONT, pid, 0, 0)
            }
            // A stop signal took effect: it stays stopped until SIGCONT.
            (libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU, libc::PTRACE_EVENT_STOP) => {
                ptrace(libc::PTRACE_LISTEN, pid, 0, 0)
            }
            (_, libc::PTRACE_EVENT_STOP) => ptrace(libc::PTRACE_CONT, pid, 0, 0),
            (signal, _) => ptrace(libc::PTRACE_CONT, pid, 0, signal as u64),
        }
        .or_else(|error| if error.raw_os_error() == Some(libc::ESRCH) { Ok(0) } else { Err(error) })
        .map_err(failed("continue it"))?;
    }
}

/// From an exec's stop to the entry point, at which the child is left standing.
fn follow(pid: i32, program: &str, look: &mut impl FnMut(bool, bool)) -> Result<(), LaunchError> {
    let failed = |step: &'static str| {
        let program = program.to_owned();
        move |source| LaunchError::Trace { program, step, source }
    };
    look(true, false);
    let entry = entry_point(pid).map_err(failed("read its entry point"))?;
    let word = peek(pid, entry).map_err(failed("read the instruction at its entry point"))?;
    poke(pid, entry, word & !BREAKPOINT_MASK | BREAKPOINT).map_err(failed("set a breakpoint at its entry point"))?;

    let mut in_call = false;
    let mut signal = 0;
    loop {
        ptrace(libc::PTRACE_SYSCALL, pid, 0, signal).map_err(failed("continue it"))?;
        signal = 0;
        let status = wait_for(pid).map_err(failed("wait for it"))?;
        if !libc::WIFSTOPPED(status) {
            return Err(LaunchError::Ended { program: program.to_owned(), status: ExitStatus::from_raw(status) });
        }
        match libc::WSTOPSIG(status) {
            stop if stop == libc::SIGTRAP | 0x80 => {
                let regs = Registers::read(pid).map_err(failed("read its registers"))?;
                // The exec itself ends first.
                in_call = regs.enters_call(in_call);
                // After the call: the result is there, the arguments behind the first still in place.
                let maps_code = regs.call() == SYS_MMAP && regs.third_argument() & libc::PROT_EXEC as u64 != 0;
                if !in_call && maps_code && regs.result() < u64::MAX - 4095 {
                    look(false, false);
                }
            }
            libc::SIGTRAP if status >> 16 == 0 => {
                let mut regs = Registers::read(pid).map_err(failed("read its registers"))?;
                if regs.pc() != entry + BREAKPOINT_PASSED_BYTES {
                    signal = libc::SIGTRAP as u64;
                    continue;
                }
                poke(pid, entry, word).map_err(failed("take the breakpoint out of its entry point"))?;
                regs.set_pc(entry);
                regs.write(pid).map_err(failed("set its instruction pointer"))?;
                look(false, true);
                return Ok(());
            }
            // A ptrace event: nothing was to be delivered.
            _ if status >> 16 != 0 => {}
            other => signal = other as u64,
        }
    }
}

/// `AT_ENTRY` of the auxiliary vector (9, `getauxval(3)`): where the program itself begins, after the dynamic linker.
fn entry_point(pid: i32) -> io::Result<u64> {
    let auxv = std::fs::read(format!("/proc/{pid}/auxv"))?;
    auxv.as_chunks::<16>()
        .0
        .iter()
        .map(|pair| {
            (u64::from_ne_bytes(pair[..8].try_into().unwrap_or_default()), u64::from_ne_bytes(pair[8..].try_into().unwrap_or_default()))
        })
        .find_map(|(kind, value)| (kind == libc::AT_ENTRY).then_some(value))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no AT_ENTRY in the auxiliary vector"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    /// Takes all looks until the command has ended; says what it saw at each, and how it ended.
    fn run(command: &[&str]) -> (Vec<(bool, bool, String)>, ExitStatus) {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        let launched = launch(&command).unwrap();
        let mut seen = Vec::new();
        while let Ok(look) = launched.looks().recv() {
            let maps = std::fs::read_to_string(format!("/proc/{}/maps", launched.pid())).unwrap();
            seen.push((look.new_image, look.at_entry, maps));
        }
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            match launched.status() {
                Some(status) => return (seen, status),
                None => assert!(std::time::Instant::now() < deadline, "no exit status"),
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_command_runs_as_if_nobody_had_followed_it_and_stops_at_its_code() {
        let (seen, status) = run(&["sh", "-c", "exit 7"]);
        assert_eq!(status.code(), Some(7));
        assert!(seen[0].0 && !seen[0].2.contains("libc.so"), "at the exec the C library is not there yet");
        let last = seen.last().unwrap();
        assert!(last.1 && last.2.contains("libc.so"));
    }

    #[test]
    fn a_program_executed_in_its_place_is_followed_too_and_signals_pass() {
        let (seen, status) = run(&["sh", "-c", "trap 'exec env sh -c \"kill -TERM \\$\\$\"' USR1; kill -USR1 $$; exit 1"]);
        assert_eq!(status.signal(), Some(libc::SIGTERM));
        assert_eq!(seen.iter().filter(|(new_image, ..)| *new_image).count(), 3, "sh, env, sh");
        assert_eq!(seen.iter().filter(|(_, at_entry, _)| *at_entry).count(), 3);
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = launch(&["/no/such/program".into()]).err().unwrap();
        assert!(error.to_string().starts_with("cannot run /no/such/program: "), "{error}");
    }
}
