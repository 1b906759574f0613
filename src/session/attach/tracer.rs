//! Traces processes so that none of their code runs before it has been examined.
//!
//! ```text
//! new child ───┐   (of vfork too, before it has its own memory)
//! exec ────────┤
//! mmap of code ┼─stop→ Stop (the driver probes what is new) ─drop→ continue
//! entry point ─┘
//! ```
//!
//! The stops at births and execs are ptrace's own. At a mapping of code at any time, and at the entry point, the BPF programs send the
//! thread a signal (bpf/hold.bpf.h), which ptrace reports here first and which is not delivered. So a process runs freely except at these
//! places: it has no stops at system calls and no breakpoints in its text.
//!
//! Tracing is tied to a thread, so one thread does all of it: while stops are being examined it serves the other processes' stops, since
//! one may wait for another. If this process ends, however it ends, the kernel resumes all of them.

use std::collections::HashMap;
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::machine::stopped::{Registers, ptrace};
use crate::units::Pid;

/// Interval between two checks for stops while a process is stopped for the driver, which answers quickly.
const STANDING_POLL: Duration = Duration::from_micros(500);
/// Maximum distance behind an entry point at which its thread may stop: the signal is delivered after an instruction that had to be
/// single-stepped.
const ENTRY_BYTES: u64 = 16;
const SYS_MMAP: u64 = libc::SYS_mmap as u64;
/// `siginfo`'s code for signals sent by the kernel (asm-generic/siginfo.h).
const SI_KERNEL: i32 = 0x80;
/// `kcmp(2)`: compares address spaces.
const KCMP_VM: i32 = 1;

/// Where a process is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum At {
    /// At its birth: it was forked by `parent` and has not run yet.
    Birth {
        /// Its parent.
        parent: Pid,
    },
    /// The same, for a child that runs in its parent's memory until it executes a program, as after vfork.
    BirthInMemory {
        /// Its parent.
        parent: Pid,
    },
    /// It executes a program and has not run any of its instructions.
    NewImage {
        /// Address of the program's entry point, if it could be read.
        entry: Option<u64>,
    },
    /// It has mapped code.
    Code,
    /// It is about to run its program: its libraries are loaded, and their constructors have run.
    Entry,
}

/// A stopped process: examine its code, then resume it by dropping this value.
#[derive(Debug)]
pub struct Stop {
    /// The process.
    pub pid: Pid,
    /// Where it is stopped.
    pub at: At,
    tid: i32,
    leave_children: bool,
    answers: Sender<Answer>,
}

impl Stop {
    /// From now on children of this process are not traced: it wants to trace them itself.
    pub fn leave_children(&mut self) {
        self.leave_children = true;
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        // If the tracer has ended, nothing is stopped any more.
        drop(self.answers.send(Answer { tid: self.tid, at: self.at, leave_children: self.leave_children }));
    }
}

#[derive(Debug)]
struct Answer {
    tid: i32,
    at: At,
    leave_children: bool,
}

/// What is traced in addition to the process itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scope {
    /// Its children too.
    pub children: bool,
}

impl Scope {
    /// `PTRACE_O_*`.
    pub fn options(self) -> u64 {
        let own = libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACECLONE;
        let children = if self.children { libc::PTRACE_O_TRACEFORK | libc::PTRACE_O_TRACEVFORK } else { 0 };
        (own | children) as u64
    }
}

/// A traced thread.
#[derive(Debug, Clone, Copy)]
struct Tracee {
    /// Its process.
    pid: i32,
    /// The entry point, until it is reached.
    entry: Option<u64>,
}

/// The tracing thread's state.
pub struct Tracer<'a> {
    scope: Scope,
    /// By thread id.
    tracees: HashMap<i32, Tracee>,
    standing: usize,
    looks: Sender<Stop>,
    /// Tells the driver that a stop is waiting.
    wake: &'a dyn Fn(),
    answer: Sender<Answer>,
    answers: Receiver<Answer>,
    /// Called for each process that ended.
    ended: &'a mut dyn FnMut(i32, ExitStatus),
}

impl<'a> Tracer<'a> {
    /// A tracer that sends its stops to `looks`.
    pub fn new(scope: Scope, looks: Sender<Stop>, wake: &'a dyn Fn(), ended: &'a mut dyn FnMut(i32, ExitStatus)) -> Self {
        let (answer, answers) = channel();
        Self { scope, tracees: HashMap::new(), standing: 0, looks, wake, answer, answers, ended }
    }

    /// Traces a running thread. `children`: its children too, if the scope includes them.
    ///
    /// # Errors
    /// If the kernel refuses, because another tracer has it.
    pub fn seize(&mut self, tid: i32, pid: i32, children: bool) -> io::Result<()> {
        let scope = Scope { children: children && self.scope.children };
        ptrace(libc::PTRACE_SEIZE, tid, 0, scope.options())?;
        self.tracees.entry(tid).or_insert(Tracee { pid, entry: None });
        Ok(())
    }

    /// Stops at the first exec of a command that was traced from its birth. Returns whether its children are to be traced.
    pub fn first_image(&mut self, pid: i32) -> bool {
        let at = self.at_new_image(pid);
        self.stand(pid, at);
        let answer = self.answers.recv();
        self.standing -= 1;
        answer.is_ok_and(|answer| !answer.leave_children)
    }

    /// Serves the stops of all tracees until none is left.
    pub fn run(&mut self) {
        loop {
            while let Ok(answer) = self.answers.try_recv() {
                self.go_on(&answer);
            }
            match wait_for_any(self.standing == 0) {
                Ok(Some((tid, status))) => self.changed(tid, status),
                Ok(None) => {
                    if let Ok(answer) = self.answers.recv_timeout(STANDING_POLL) {
                        self.go_on(&answer);
                    }
                }
                // No tracee is left.
                Err(_) => return,
            }
        }
    }

    fn changed(&mut self, tid: i32, status: i32) {
        if !libc::WIFSTOPPED(status) {
            let pid = self.tracees.remove(&tid).map(|tracee| tracee.pid);
            if pid.is_none_or(|pid| pid == tid) {
                (self.ended)(tid, ExitStatus::from_raw(status));
            }
            return;
        }
        let signal = libc::WSTOPSIG(status);
        match status >> 16 {
            0 => self.signalled(tid, signal),
            libc::PTRACE_EVENT_EXEC => self.executed(tid),
            // A new tracee stops by itself. The event of its creation is not awaited: a parent that is killed meanwhile never reports it.
            libc::PTRACE_EVENT_STOP if !self.tracees.contains_key(&tid) => self.begin(tid),
            // A stop signal took effect: it stays stopped until SIGCONT.
            libc::PTRACE_EVENT_STOP if matches!(signal, libc::SIGSTOP | libc::SIGTSTP | libc::SIGTTIN | libc::SIGTTOU) => {
                gone_is_fine(ptrace(libc::PTRACE_LISTEN, tid, 0, 0));
            }
            _ => resume(tid, 0),
        }
    }

    /// A new thread or process that is stopped before its first instruction.
    fn begin(&mut self, tid: i32) {
        let Some((pid, parent)) = family(tid) else { return resume(tid, 0) };
        self.tracees.insert(tid, Tracee { pid, entry: None });
        if pid != tid {
            return resume(tid, 0);
        }
        let shares = share_memory(parent, tid);
        let parent = Pid(parent.cast_unsigned());
        self.stand(tid, if shares { At::BirthInMemory { parent } } else { At::Birth { parent } });
    }

    fn executed(&mut self, tid: i32) {
        // The thread that executes takes over the process id; the other threads are gone.
        if let Ok(former) = former_id(tid)
            && former != tid
        {
            self.tracees.remove(&former);
        }
        let at = self.at_new_image(tid);
        self.stand(tid, at);
    }

    fn at_new_image(&mut self, pid: i32) -> At {
        let entry = entry_point(pid).inspect_err(|error| tracing::debug!("process {pid}: no entry point: {error}")).ok();
        self.tracees.insert(pid, Tracee { pid, entry });
        At::NewImage { entry }
    }

    fn signalled(&mut self, tid: i32, signal: i32) {
        let held = signal == libc::SIGURG && signal_code(tid).is_ok_and(|code| code == SI_KERNEL);
        match held.then(|| self.held_at(tid)).flatten() {
            Some(at) => self.stand(tid, at),
            None => resume(tid, signal),
        }
    }

    /// Why the BPF programs stopped it; `None` if the signal is not theirs.
    fn held_at(&mut self, tid: i32) -> Option<At> {
        let regs = Registers::read(tid).ok()?;
        let tracee = self.tracees.get_mut(&tid)?;
        if let Some(entry) = tracee.entry
            && (entry..entry + ENTRY_BYTES).contains(&regs.pc())
        {
            tracee.entry = None;
            return Some(At::Entry);
        }
        let maps_code = regs.call() == SYS_MMAP && regs.third_argument() & libc::PROT_EXEC as u64 != 0;
        (maps_code && regs.result() < u64::MAX - 4095).then_some(At::Code)
    }

    fn stand(&mut self, tid: i32, at: At) {
        let pid = self.tracees.get(&tid).map_or(tid, |tracee| tracee.pid);
        let look = Stop { pid: Pid(pid.cast_unsigned()), at, tid, leave_children: false, answers: self.answer.clone() };
        self.standing += 1;
        // If there is no receiver any more, the stop is dropped here, and the thread continues.
        if self.looks.send(look).is_ok() {
            (self.wake)();
        }
    }

    fn go_on(&mut self, answer: &Answer) {
        self.standing -= 1;
        if matches!(answer.at, At::NewImage { .. }) && self.scope.children {
            let scope = Scope { children: !answer.leave_children };
            gone_is_fine(ptrace(libc::PTRACE_SETOPTIONS, answer.tid, 0, scope.options()));
        }
        resume(answer.tid, 0);
    }
}

fn resume(tid: i32, signal: i32) {
    gone_is_fine(ptrace(libc::PTRACE_CONT, tid, 0, signal as u64));
}

fn gone_is_fine(result: io::Result<i64>) {
    if let Err(error) = result
        && error.raw_os_error() != Some(libc::ESRCH)
    {
        tracing::warn!("a traced thread cannot be resumed: {error}");
    }
}

/// The next state change of a process or thread that this thread traces. Without `block`, `None` if there is none now.
fn wait_for_any(block: bool) -> io::Result<Option<(i32, i32)>> {
    let flags = libc::__WALL | libc::__WNOTHREAD | if block { 0 } else { libc::WNOHANG };
    loop {
        let mut status = 0;
        // SAFETY: waits for tracees of this thread and writes the status into a local.
        match unsafe { libc::waitpid(-1, &raw mut status, flags) } {
            0 => return Ok(None),
            tid if tid > 0 => return Ok(Some((tid, status))),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

/// The former id of a thread that has executed a program.
fn former_id(tid: i32) -> io::Result<i32> {
    let mut message: libc::c_ulong = 0;
    ptrace(libc::PTRACE_GETEVENTMSG, tid, 0, (&raw mut message) as u64)?;
    i32::try_from(message).map_err(io::Error::other)
}

fn signal_code(tid: i32) -> io::Result<i32> {
    // SAFETY: the struct is plain integers, so zeroes are a value of it.
    let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETSIGINFO, tid, 0, (&raw mut info) as u64)?;
    Ok(info.si_code)
}

/// A thread's process and that process's parent.
fn family(tid: i32) -> Option<(i32, i32)> {
    let status = std::fs::read(format!("/proc/{tid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let number = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    Some((number("Tgid:")?, number("PPid:")?))
}

/// Whether a child runs in its parent's memory, as after vfork. Without kcmp in the kernel (CONFIG_KCMP) the answer is always no.
fn share_memory(parent: i32, child: i32) -> bool {
    // SAFETY: compares two processes; takes integers alone.
    let order = unsafe { libc::syscall(libc::SYS_kcmp, parent, child, KCMP_VM, 0, 0) };
    order == 0
}

/// `AT_ENTRY` of the auxiliary vector (9, `getauxval(3)`): the entry point of the program itself, after the dynamic linker.
fn entry_point(pid: i32) -> io::Result<u64> {
    let auxv = std::fs::read(format!("/proc/{pid}/auxv"))?;
    let number = |bytes: &[u8]| u64::from_ne_bytes(bytes.try_into().unwrap_or_default());
    let pairs = auxv.as_chunks::<16>().0.iter().map(|pair| (number(&pair[..8]), number(&pair[8..])));
    pairs
        .into_iter()
        .find_map(|(kind, value)| (kind == libc::AT_ENTRY).then_some(value))
        .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no AT_ENTRY in the auxiliary vector"))
}
