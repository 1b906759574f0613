//! Starts a command so that not even its first allocation is missed, including those of programs that it executes and of its children; and
//! follows running processes in the same way.
//!
//! The command stops at its exec. From then on it is seized (so that stop signals work as usual) and stops where tracer.rs says:
//! constructors of libraries run before the entry point, and they allocate.

use std::collections::HashSet;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, OnceLock};

use crate::machine::stopped::{ptrace, wait_for};
use crate::session::attach::tracer::{Scope, Stop, Tracer};
use crate::units::Pid;

/// Why a command could not be started under watch.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program could not be executed.
    #[error("cannot run {program}: {source}")]
    Spawn {
        /// The program as given.
        program: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// The thread that follows it could not be started.
    #[error("cannot start a thread to follow {program}: {source}")]
    Thread {
        /// The program as given.
        program: String,
        /// The operating system's error.
        source: io::Error,
    },
    /// A step of following it failed.
    #[error("cannot follow {program}: {step}: {source}")]
    Trace {
        /// The program as given.
        program: String,
        /// The step that failed.
        step: &'static str,
        /// The operating system's error.
        source: io::Error,
    },
}

/// Tells the driver that a stop is waiting.
pub type Wake = Box<dyn Fn() + Send>;

/// Processes that are stopped where there is something to examine.
pub struct Followed {
    /// The command's process; `None` if the processes were already running.
    pid: Option<Pid>,
    looks: Receiver<Stop>,
    status: Arc<OnceLock<ExitStatus>>,
}

impl Followed {
    /// The command's process, if one was started.
    pub fn pid(&self) -> Option<Pid> {
        self.pid
    }

    /// The stops that wait to be examined.
    pub fn looks(&self) -> &Receiver<Stop> {
        &self.looks
    }

    /// How the command ended, once it has.
    pub fn status(&self) -> Option<ExitStatus> {
        self.status.get().copied()
    }
}

/// Starts the command, with this value of `LD_PRELOAD` if there is one. It is stopped at its exec until the first [`Stop`] is taken and
/// dropped.
///
/// # Errors
/// [`LaunchError::Spawn`] if there is no such program or it may not be executed.
pub fn launch(command: &[OsString], preload: Option<OsString>, scope: Scope, wake: Wake) -> Result<Followed, LaunchError> {
    let program = command.first().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let mut spawn = Command::new(command.first().map_or_else(Default::default, Clone::clone));
    spawn.args(command.iter().skip(1)).envs(preload.map(|value| ("LD_PRELOAD", value)));
    let (started, result) = sync_channel(1);
    let (stops, looks) = channel();
    let status = Arc::<OnceLock<ExitStatus>>::default();
    let shared = Arc::clone(&status);
    let name = program.clone();
    std::thread::Builder::new()
        .name("fragprof-trace".into())
        .spawn(move || start_and_follow(spawn, &name, scope, &wake, &started, stops, &shared))
        .map_err(|source| LaunchError::Thread { program: program.clone(), source })?;
    let ended = || LaunchError::Thread { program: program.clone(), source: io::Error::other("it ended early") };
    let pid = result.recv().map_err(|_| ended())??;
    Ok(Followed { pid: Some(pid), looks, status })
}

/// The thread's main function.
fn start_and_follow(
    mut spawn: Command,
    program: &str,
    scope: Scope,
    wake: &Wake,
    started: &SyncSender<Result<Pid, LaunchError>>,
    stops: Sender<Stop>,
    status: &OnceLock<ExitStatus>,
) {
    let prepare = || {
        crate::machine::open_files::restore_in_child()?;
        ptrace(libc::PTRACE_TRACEME, 0, 0, 0).map(drop)
    };
    // SAFETY: between fork and exec only async-signal-safe system calls are made.
    unsafe { spawn.pre_exec(prepare) };
    let child = match spawn.spawn() {
        Ok(child) => child,
        Err(source) => {
            // The caller waits for this message.
            drop(started.send(Err(LaunchError::Spawn { program: program.to_owned(), source })));
            return;
        }
    };
    let pid = child.id().cast_signed();
    drop(started.send(Ok(Pid(child.id()))));
    let mut ended = |ended: i32, how: ExitStatus| {
        if ended == pid {
            let _ = status.set(how);
        }
    };
    let mut tracer = Tracer::new(scope, stops, wake, &mut ended);
    match begin(pid, program, &mut tracer) {
        Ok(None) => {}
        Ok(Some(how)) => {
            let _ = status.set(how);
            return;
        }
        // The command keeps running without being followed.
        Err(error) => tracing::warn!("{error}"),
    }
    tracer.run();
}

/// From the stop at the exec until the command is seized and runs. Returns its status if it ended before.
fn begin(pid: i32, program: &str, tracer: &mut Tracer<'_>) -> Result<Option<ExitStatus>, LaunchError> {
    let failed = |step: &'static str| {
        let program = program.to_owned();
        move |source| LaunchError::Trace { program, step, source }
    };
    let status = wait_for(pid).map_err(failed("wait for its exec"))?;
    if !libc::WIFSTOPPED(status) {
        return Ok(Some(ExitStatus::from_raw(status)));
    }
    let children = tracer.first_image(pid);
    // Stopped in between: it must not run before it is seized.
    ptrace(libc::PTRACE_DETACH, pid, 0, libc::SIGSTOP as u64).map_err(failed("detach from it"))?;
    let seized = tracer.seize(pid, pid, children).map_err(failed("trace it"));
    // Resumes it even if that failed: otherwise it would stay stopped forever.
    let child = rustix::process::Pid::from_raw(pid).ok_or(io::ErrorKind::NotFound.into());
    let goes_on = child.and_then(|child| Ok(rustix::process::kill_process(child, rustix::process::Signal::CONT)?));
    seized?;
    goes_on.map_err(failed("continue it"))?;
    Ok(None)
}

/// Maximum number of rounds that look for new threads.
const SEIZE_ROUNDS_MAX: usize = 100;

/// Follows running processes and their children without stopping them. Also returns the processes that cannot be followed, each with the
/// reason.
///
/// # Errors
/// If the thread cannot be started.
pub fn follow(pids: Vec<Pid>, wake: Wake) -> Result<(Followed, Vec<(Pid, io::Error)>), LaunchError> {
    let thread = |source| LaunchError::Thread { program: "the processes".into(), source };
    let (started, result) = sync_channel(1);
    let (stops, looks) = channel();
    std::thread::Builder::new()
        .name("fragprof-trace".into())
        .spawn(move || {
            let mut ended = |_, _| {};
            let mut tracer = Tracer::new(Scope { children: true }, stops, &wake, &mut ended);
            let seized = |pid: Pid| seize_threads(&mut tracer, pid).err().map(|error| (pid, error));
            drop(started.send(pids.into_iter().filter_map(seized).collect()));
            tracer.run();
        })
        .map_err(thread)?;
    let refused = result.recv().map_err(|_| thread(io::Error::other("it ended early")))?;
    Ok((Followed { pid: None, looks, status: Arc::default() }, refused))
}

/// Traces every thread of a process. Threads created by a traced thread are traced automatically.
fn seize_threads(tracer: &mut Tracer<'_>, pid: Pid) -> io::Result<()> {
    let mut seen = HashSet::new();
    for _ in 0..SEIZE_ROUNDS_MAX {
        let before = seen.len();
        for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
            let Some(tid) = thread?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            if !seen.insert(tid) {
                continue;
            }
            match tracer.seize(tid, pid.0.cast_signed(), true) {
                // A thread that has ended, or was created by a traced one.
                Err(error) if tid != pid.0.cast_signed() => tracing::debug!("thread {tid} of process {pid}: {error}"),
                other => other?,
            }
        }
        if seen.len() == before {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::session::attach::tracer::At;

    /// Takes all stops until the command has ended. Returns what it saw at each, and how the command ended. No programs are loaded, so
    /// nothing stops at mappings and entry points.
    fn run(command: &[&str]) -> (Vec<(Pid, At)>, Pid, ExitStatus) {
        let command: Vec<OsString> = command.iter().map(OsString::from).collect();
        let followed = launch(&command, None, Scope { children: true }, Box::new(|| {})).unwrap();
        let seen = followed.looks().iter().map(|look| (look.pid, look.at)).collect();
        (seen, followed.pid().unwrap(), followed.status().unwrap())
    }

    fn images(seen: &[(Pid, At)], of: impl Fn(Pid) -> bool) -> usize {
        seen.iter().filter(|(pid, at)| of(*pid) && matches!(at, At::NewImage { entry: Some(_) })).count()
    }

    #[test]
    fn following_does_not_change_how_a_command_runs() {
        let (seen, pid, status) = run(&["sh", "-c", "exit 7"]);
        assert_eq!(status.code(), Some(7));
        assert_eq!(images(&seen, |of| of == pid), 1);
    }

    #[test]
    fn a_program_executed_in_its_place_is_followed_too_and_signals_pass() {
        let (seen, pid, status) = run(&["sh", "-c", "trap 'exec env sh -c \"kill -TERM \\$\\$\"' USR1; kill -USR1 $$; exit 1"]);
        assert_eq!(status.signal(), Some(libc::SIGTERM));
        assert_eq!(images(&seen, |of| of == pid), 3, "sh, env, sh");
    }

    #[test]
    fn children_and_grandchildren_stop_at_fork_and_exec() {
        let (seen, pid, status) = run(&["sh", "-c", "(env true; exit 3) & wait $!; exit $?"]);
        assert_eq!(status.code(), Some(3));
        let births = seen.iter().filter(|(_, at)| matches!(at, At::Birth { .. })).count();
        assert!(births >= 1, "{seen:?}");
        assert_eq!(images(&seen, |of| of != pid), 2, "env and true, in whichever child: {seen:?}");
    }

    #[test]
    fn a_stop_signal_stops_a_followed_child_and_its_parent_sees_it() {
        // The shell's own job control: it reports the child's state changes, and the stop again until it has seen that the child continues.
        let script = "set -m; sh -c 'kill -STOP $$' & wait $!; test $? -gt 128 || exit 1; kill -CONT $!
            for turn in $(seq 500); do wait $! && exit 0; sleep 0.01; done; exit 2";
        let (_, _, status) = run(&["bash", "-c", script]);
        assert_eq!(status.code(), Some(0));
    }

    #[test]
    fn a_missing_program_is_named_in_the_error() {
        let error = launch(&["/no/such/program".into()], None, Scope { children: true }, Box::new(|| {})).err().unwrap();
        assert!(error.to_string().starts_with("cannot run /no/such/program: "), "{error}");
    }
}
