//! The ptrace edge: stops one thread for some microseconds, makes sure that it is at a safe place, and commits the call.
//!
//! Each attempt runs in a thread of its own. When that thread ends, in whatever way, the kernel detaches what it traced and lets it run on:
//! there is nothing that would have to be undone, because everything before the commit only reads, or writes below the stack's red zone.

use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::frame::{self, Frames, Restored};
use super::machine::{self, Context, FRAME_POINTER, Pending, STACK_POINTER, Software};
use super::memory;
use super::parked::{Parked, Rank};
use super::refusal::{Failed, Refusal, Unfit};
use super::seccomp::{self, Decision, Instruction};
use super::stack::{self, ThreadStack};
use super::status::ThreadStatus;
use super::{Call, Limits};
use crate::machine::stopped::{Registers, ptrace};
use crate::machine::user_space::code_address;
use crate::process::Process;
use crate::process::stack::{Standing, Walker};

/// Requests that the libc crate lacks (uapi/linux/ptrace.h).
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_SECCOMP_GET_FILTER: libc::c_uint = 0x420c;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: libc::c_uint = 0x4210;
/// Attempts to trace a thread that the kernel does not permit, although nobody traces it.
const SEIZED_MAX: u32 = 3;
/// Interval between two checks for a stop; the first ones are closer.
const POLL: Duration = Duration::from_micros(50);
const POLL_CLOSELY: Duration = Duration::from_millis(1);

/// A committed call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Committed {
    /// When the thread was let go.
    pub at: Instant,
    /// How long the thread stood.
    pub stopped: Duration,
    /// Whether the stop made its system call return EINTR.
    pub is_interrupted: bool,
    /// Address of the canary.
    pub canary: u64,
}

/// Stops the thread, checks it, and commits the call. To be called in a thread that ends soon after.
pub(super) fn attempt(
    process: &Process,
    parked: &Parked,
    call: &Call<'_>,
    limits: &Limits,
    software: &Software,
    walker: Option<&mut Walker<'_>>,
) -> Result<Committed, Failed> {
    let tid = parked.tid.cast_signed();
    seize(process, tid)?;
    let asked = Instant::now();
    ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0).map_err(|_| Unfit::MovedOn)?;
    let status = wait(tid, limits.stop)?;
    let mut stopped_at = Instant::now();
    let tracee = Tracee { tid, process };
    let (event, signal) = (status >> 16, libc::WSTOPSIG(status));
    if event != libc::PTRACE_EVENT_STOP || signal != libc::SIGTRAP {
        // A signal that was about to be delivered is; a group-stop is no signal.
        tracee.detach(if event == 0 { signal } else { 0 });
        return Err(if event == libc::PTRACE_EVENT_STOP { Refusal::Stopped.into() } else { Unfit::Signalled.into() });
    }
    tracing::debug!("thread {tid} stood after {:?}", stopped_at - asked);
    let mut stopped = tracee.stopped()?;
    let begins_again = matches!(stopped.pending, Pending::Restarts | Pending::RestartsForRest);
    if begins_again && stopped.rank() == Some(Rank::WaitsFor) {
        stopped = tracee.to_the_end_of_its_call(&stopped, limits.sleep)?;
        stopped_at = Instant::now();
    }
    let is_current = || call.image.check(process).map_err(Failed::from);
    let prepared = is_current()
        .and_then(|()| prepare(&tracee, &stopped, call, software, walker))
        // Another thread may have executed a program meanwhile, which ends this one.
        .and_then(|prepared| is_current().map(|()| prepared));
    match prepared {
        Ok((frames, is_interrupted)) => {
            commit(&tracee, &stopped.registers, &frames, call.trampoline)?;
            let at = Instant::now();
            Ok(Committed { at, stopped: at - stopped_at, is_interrupted, canary: frames.canary })
        }
        Err(failed) => {
            tracee.detach(0);
            Err(failed)
        }
    }
}

fn seize(process: &Process, tid: i32) -> Result<(), Failed> {
    for _ in 0..SEIZED_MAX {
        let Err(error) = ptrace(libc::PTRACE_SEIZE, tid, 0, 0) else { return Ok(()) };
        match error.raw_os_error() {
            Some(libc::ESRCH) => return Err(Unfit::MovedOn.into()),
            Some(libc::EPERM) => {}
            _ => return Err(kernel("PTRACE_SEIZE", &error).into()),
        }
        match ThreadStatus::read(&process.directory().join(format!("task/{tid}"))) {
            Some(status) if status.tracer != 0 => return Err(Refusal::Traced { tracer: status.tracer }.into()),
            Some(_) => {}
            None => return Err(Unfit::MovedOn.into()),
        }
        // The kernel gives the same answer for a thread that is traced: its tracer may have let it go meanwhile.
        std::thread::sleep(POLL);
    }
    Err(not_permitted().into())
}

pub(super) fn not_permitted() -> Refusal {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let scope = scope.trim();
    let is_open = scope.is_empty() || scope == "0";
    Refusal::NotPermitted { hint: if is_open { String::new() } else { format!(" (kernel.yama.ptrace_scope is {scope})") } }
}

fn kernel(what: &'static str, error: &std::io::Error) -> Refusal {
    Refusal::Kernel { what, reason: error.to_string() }
}

/// Waits for a stop. When the time is over the thread is left as it is: it is detached when this thread ends.
fn wait(tid: i32, limit: Duration) -> Result<i32, Failed> {
    let begun = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: waits for a tracee of this thread, and writes the status into a local.
        let done = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL | libc::__WNOTHREAD | libc::WNOHANG) };
        if done == tid {
            return if libc::WIFSTOPPED(status) { Ok(status) } else { Err(Unfit::MovedOn.into()) };
        }
        if done < 0 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted {
            return Err(Unfit::MovedOn.into());
        }
        let waited = begun.elapsed();
        if waited > limit {
            return Err(Unfit::NotStopped.into());
        }
        if waited < POLL_CLOSELY { std::thread::yield_now() } else { std::thread::sleep(POLL) }
    }
}

/// A thread that is stopped, or has just been let go.
struct Tracee<'a> {
    tid: i32,
    process: &'a Process,
}

impl Tracee<'_> {
    fn detach(&self, signal: i32) {
        // A thread that was killed meanwhile is gone, which is fine.
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, signal as u64);
    }

    fn registers(&self) -> Result<Registers, Failed> {
        Registers::read(self.tid).map_err(|_| Unfit::MovedOn.into())
    }

    fn stopped(&self) -> Result<Stopped, Failed> {
        let registers = self.registers()?;
        let (thread, pending) = (machine::context(&registers), machine::pending(&registers, self.pid()));
        Ok(Stopped { registers, thread, pending, is_exit: false })
    }

    fn pid(&self) -> i32 {
        self.process.pid().0.cast_signed()
    }

    /// Lets a wait with a timeout go on, and stops the thread at the wait's end. If that takes too long, the thread is left to sleep.
    fn to_the_end_of_its_call(&self, before: &Stopped, limit: Duration) -> Result<Stopped, Failed> {
        let begun = Instant::now();
        ptrace(libc::PTRACE_SETOPTIONS, self.tid, 0, libc::PTRACE_O_TRACESYSGOOD as u64).map_err(|_| Unfit::MovedOn)?;
        let mut is_entered = false;
        let mut signal = 0;
        loop {
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, signal as u64).map_err(|_| Unfit::MovedOn)?;
            let status = match wait(self.tid, limit.saturating_sub(begun.elapsed())) {
                Err(Failed::Unfit(Unfit::NotStopped)) => return Err(Unfit::SleepsLong.into()),
                other => other?,
            };
            let event = status >> 16;
            signal = libc::WSTOPSIG(status);
            if event != 0 {
                self.detach(0);
                return Err(Unfit::Signalled.into());
            }
            if signal == libc::SIGTRAP | 0x80 {
                if is_entered {
                    let registers = self.registers()?;
                    let thread = machine::context_at_exit(&registers, &before.registers);
                    let pending = machine::pending(&registers, self.pid());
                    return Ok(Stopped { registers, thread, pending, is_exit: true });
                }
                is_entered = true;
                signal = 0;
            }
        }
    }

    fn mask(&self) -> Result<u64, Failed> {
        let mut mask = 0u64;
        ptrace(PTRACE_GETSIGMASK, self.tid, 8, (&raw mut mask) as u64).map_err(|error| kernel("PTRACE_GETSIGMASK", &error))?;
        Ok(mask)
    }

    /// Whether the thread's seccomp filters allow all that the call does.
    fn seccomp(&self, call: &Call<'_>) -> Result<(), Failed> {
        let status = ThreadStatus::read(&self.process.directory().join(format!("task/{}", self.tid))).ok_or(Unfit::MovedOn)?;
        match status.seccomp {
            0 => return Ok(()),
            1 => return Err(Refusal::StrictSeccomp.into()),
            _ => {}
        }
        let unreadable = |error: std::io::Error| Refusal::SeccompUnreadable { reason: error.to_string() };
        for index in 0..seccomp::FILTERS_MAX {
            let count = match ptrace(PTRACE_SECCOMP_GET_FILTER, self.tid, index as u64, 0) {
                Ok(count) => usize::try_from(count).unwrap_or(0).min(seccomp::INSTRUCTIONS_MAX),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(()),
                Err(error) => return Err(unreadable(error).into()),
            };
            // `struct sock_filter` is 8 bytes: code, jt, jf, k.
            let mut words = vec![0u64; count];
            ptrace(PTRACE_SECCOMP_GET_FILTER, self.tid, index as u64, words.as_mut_ptr() as u64).map_err(unreadable)?;
            let filter: Vec<Instruction> = words
                .iter()
                .map(|word| Instruction { code: *word as u16, jt: (*word >> 16) as u8, jf: (*word >> 24) as u8, k: (*word >> 32) as u32 })
                .collect();
            let needed = call.system_calls.iter().chain(&[("rt_sigreturn", libc::SYS_rt_sigreturn)]);
            for &(name, number) in needed {
                if seccomp::decide(&filter, number as u32) != Decision::Allows {
                    return Err(Refusal::SeccompFilter { call: name }.into());
                }
            }
        }
        Err(Refusal::SeccompUnreadable { reason: "too many filters".into() }.into())
    }

    /// Syscall user dispatch would turn the trampoline's system call into a signal. Kernels before 6.4 cannot say.
    fn dispatch(&self) -> Result<(), Failed> {
        let mut config = [0u64; 4];
        let bytes = size_of_val(&config) as u64;
        match ptrace(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, self.tid, bytes, config.as_mut_ptr() as u64) {
            Ok(_) if config[0] != 0 => Err(Refusal::SeccompFilter { call: "rt_sigreturn (syscall user dispatch)" }.into()),
            _ => Ok(()),
        }
    }
}

/// A thread as it stands.
struct Stopped {
    registers: Registers,
    /// With which it would go on.
    thread: Context,
    pending: Pending,
    /// At the end of a wait that was waited for.
    is_exit: bool,
}

impl Stopped {
    /// How well the system call bears an interruption.
    fn rank(&self) -> Option<Rank> {
        machine::system_call(&self.registers).rank()
    }
}

/// Checks a stopped thread, and lays out its frames. Returns them, and whether its system call returns EINTR.
fn prepare(
    tracee: &Tracee<'_>,
    stopped: &Stopped,
    call: &Call<'_>,
    software: &Software,
    walker: Option<&mut Walker<'_>>,
) -> Result<(Frames, bool), Failed> {
    let floating = machine::floating(tracee.tid).map_err(|error| kernel("PTRACE_GETREGSET", &error))?;
    machine::check(tracee.tid, &stopped.registers, &floating)?;
    let mut thread = stopped.thread;
    let rank = stopped.rank();
    if !stopped.is_exit && rank.is_none() {
        return Err(Unfit::MovedOn.into());
    }
    let is_interrupted = match stopped.pending {
        Pending::Restarts if !stopped.is_exit => {
            machine::restart(&mut thread, &stopped.registers);
            false
        }
        // A wait until a moment, or for ever.
        Pending::RestartsForRest if !stopped.is_exit && rank.is_some_and(|rank| rank <= Rank::Restarts) => {
            machine::restart(&mut thread, &stopped.registers);
            false
        }
        // Whatever else asks to be restarted, and what was interrupted again after its end was waited for.
        Pending::Restarts | Pending::RestartsForRest | Pending::Unknown => return Err(Unfit::Signalled.into()),
        Pending::Returned { is_interrupted } => is_interrupted && !stopped.is_exit,
    };
    tracee.dispatch()?;
    tracee.seccomp(call)?;
    let thread_pointer = machine::thread_pointer(tracee.tid, &stopped.registers).map_err(|error| kernel("PTRACE_GETREGSET", &error))?;
    let stack = check_stack(tracee, &thread, thread_pointer, call, walker)?;
    let restored = Restored { context: &thread, mask: tracee.mask()?, floating: &floating };
    let frames = frame::lay_out(&restored, software, call.function, call.arguments, call.trampoline, stack.low)?;
    // The part of the stack that the call itself needs must be there.
    let mut below = vec![0; frame::CALL_BYTES as usize];
    if memory::read(tracee.pid(), frames.start - frame::CALL_BYTES, &mut below) != below.len() {
        return Err(Unfit::SmallStack.into());
    }
    Ok((frames, is_interrupted))
}

/// Makes sure that the thread is in its own stack and not inside the forbidden code. `walker`, with its tables read, settles what words of
/// the stack leave open.
fn check_stack(
    tracee: &Tracee<'_>,
    thread: &Context,
    thread_pointer: u64,
    call: &Call<'_>,
    walker: Option<&mut Walker<'_>>,
) -> Result<ThreadStack, Failed> {
    let directory: &Path = tracee.process.directory();
    let maps = tracee.process.maps().map_err(|_| Refusal::Ended)?;
    let pointer = thread.general[STACK_POINTER];
    let stack = stack::find(&maps, tracee.tid == tracee.pid(), pointer, thread_pointer, |range| stack::guard_below(directory, range))?;
    let mut bytes = vec![0; (stack.end - pointer) as usize];
    if memory::read(tracee.pid(), pointer, &mut bytes) != bytes.len() {
        return Err(Unfit::StackUnreadable.into());
    }
    let words = bytes.as_chunks::<8>().0;
    let link = machine::LINK.and_then(|number| thread.general.get(number).copied());
    let code = words.iter().map(|word| u64::from_le_bytes(*word)).chain(link).map(code_address).chain([thread.pc]);
    let Some(mut forbidden) = stack::forbidden_at(code, call.forbidden) else {
        return Ok(stack);
    };
    if let Some(walker) = walker {
        let word = |addr: u64| {
            let index = usize::try_from(addr.checked_sub(pointer).filter(|offset| offset % 8 == 0)? / 8).ok()?;
            words.get(index).map(|word| u64::from_le_bytes(*word))
        };
        let walk = walker.walk(Standing { pc: thread.pc, sp: pointer, bp: Some(thread.general[FRAME_POINTER]), link }, &word);
        match stack::forbidden_at(walk.frames.iter().map(|frame| frame.pc), call.forbidden) {
            None if walk.is_complete => return Ok(stack),
            None => {}
            Some(found) => forbidden = found,
        }
    }
    Err(Unfit::InForbiddenCode { what: forbidden.what.clone() }.into())
}

/// Writes the frames, then the registers: the commit. From here on the thread does all by itself.
fn commit(tracee: &Tracee<'_>, registers: &Registers, frames: &Frames, trampoline: u64) -> Result<(), Failed> {
    let mut go = registers.clone();
    go.set_pc(trampoline);
    go.set_general(STACK_POINTER as u8, frames.stack_pointer);
    go.set_general(0, 0);
    go.clear_flags(machine::FLAGS_CLEARED);
    go.forget_call();
    let done = if memory::write(tracee.pid(), frames.start, &frames.bytes) {
        go.write(tracee.tid).map_err(|error| Failed::from(kernel("PTRACE_SETREGSET", &error)))
    } else {
        Err(Unfit::StackUnreadable.into())
    };
    tracee.detach(0);
    done
}

/// Whether the process runs in its parent's memory.
pub(super) fn shares_memory(pid: u32, parent: u32) -> bool {
    const KCMP_VM: i32 = 1;
    // SAFETY: compares two processes; takes integers alone.
    parent != 0 && unsafe { libc::syscall(libc::SYS_kcmp, pid, parent, KCMP_VM, 0, 0) } == 0
}

/// Whether the process behind a descriptor has ended.
pub(super) fn has_ended(process: &Process) -> bool {
    process.pidfd().map_or_else(
        || !process.is_alive(),
        |pidfd| {
            let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one entry, which outlives the call; it does not wait.
            unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
        },
    )
}
