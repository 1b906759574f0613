//! Starting a command so that not even its first allocation is missed.
//!
//! The child stops at its exec. From there to the program's entry point every mapping of code is a stop, at which the caller looks for
//! allocators and probes them before the dynamic linker goes on: constructors of libraries run before the entry point, and they
//! allocate. At the entry point the child is let go; nothing of the tracing stays.
//!
//! ```text
//! fork → PTRACE_TRACEME → exec ─stop→ (mmap PROT_EXEC ─stop→ on_code)* → AT_ENTRY ─stop→ on_code → detach
//! ```

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Child, Command, ExitStatus};

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

/// x86-64: the number of mmap in `orig_rax`.
const SYS_MMAP: u64 = libc::SYS_mmap as u64;
/// x86-64: the breakpoint instruction.
const INT3: u64 = 0xcc;

/// Starts the command and follows it to its entry point. `on_code` is called while the child stands still, at its exec and after each
/// mapping of code.
///
/// # Errors
/// [`LaunchError`]; the child is killed if it was started.
pub fn launch(command: &[OsString], mut on_code: impl FnMut(Pid)) -> Result<Child, LaunchError> {
    let program = command.first().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
    let mut spawn = Command::new(command.first().map_or_else(Default::default, Clone::clone));
    spawn.args(command.iter().skip(1));
    // SAFETY: between fork and exec only an async-signal-safe system call is made.
    unsafe { spawn.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0, 0).map(drop)) };
    let mut child = spawn.spawn().map_err(|source| LaunchError::Spawn { program: program.clone(), source })?;
    match follow(&child, &program, &mut on_code) {
        Ok(()) => Ok(child),
        Err(error) => {
            // It may be dead already; nothing else can be done about a failure here.
            drop(child.kill());
            drop(child.wait());
            Err(error)
        }
    }
}

fn follow(child: &Child, program: &str, on_code: &mut impl FnMut(Pid)) -> Result<(), LaunchError> {
    let pid = child.id() as i32;
    let failed = |step: &'static str| {
        let program = program.to_owned();
        move |source| LaunchError::Trace { program, step, source }
    };
    let ended = |status: i32| LaunchError::Ended { program: program.to_owned(), status: ExitStatus::from_raw(status) };

    let status = wait_for(pid).map_err(failed("wait for its exec"))?;
    if !libc::WIFSTOPPED(status) {
        return Err(ended(status));
    }
    ptrace(libc::PTRACE_SETOPTIONS, pid, 0, libc::PTRACE_O_TRACESYSGOOD as u64).map_err(failed("set trace options"))?;
    on_code(Pid(child.id()));

    let entry = entry_point(pid).map_err(failed("read its entry point"))?;
    let word = peek(pid, entry).map_err(failed("read the instruction at its entry point"))?;
    poke(pid, entry, word & !0xff | INT3).map_err(failed("set a breakpoint at its entry point"))?;

    let mut in_call = false;
    let mut signal = 0;
    loop {
        ptrace(libc::PTRACE_SYSCALL, pid, 0, signal).map_err(failed("continue it"))?;
        signal = 0;
        let status = wait_for(pid).map_err(failed("wait for it"))?;
        if !libc::WIFSTOPPED(status) {
            return Err(ended(status));
        }
        match libc::WSTOPSIG(status) {
            stop if stop == libc::SIGTRAP | 0x80 => {
                in_call = !in_call;
                if in_call {
                    continue;
                }
                let regs = registers(pid).map_err(failed("read its registers"))?;
                // After the call: the result in rax, the arguments still in place.
                if regs.orig_rax == SYS_MMAP && regs.rdx & libc::PROT_EXEC as u64 != 0 && regs.rax < u64::MAX - 4095 {
                    on_code(Pid(child.id()));
                }
            }
            libc::SIGTRAP => {
                let mut regs = registers(pid).map_err(failed("read its registers"))?;
                if regs.rip != entry + 1 {
                    signal = libc::SIGTRAP as u64;
                    continue;
                }
                poke(pid, entry, word).map_err(failed("take the breakpoint out of its entry point"))?;
                regs.rip = entry;
                set_registers(pid, &regs).map_err(failed("set its instruction pointer"))?;
                on_code(Pid(child.id()));
                ptrace(libc::PTRACE_DETACH, pid, 0, 0).map_err(failed("let it go"))?;
                return Ok(());
            }
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

fn ptrace(request: libc::c_uint, pid: i32, address: u64, data: u64) -> io::Result<i64> {
    // SAFETY: the requests used here take integers, or a pointer to a struct that the caller owns and that outlives the call.
    let result = unsafe { libc::ptrace(request, pid, address, data) };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn peek(pid: i32, address: u64) -> io::Result<u64> {
    // SAFETY: errno is the calling thread's own; the request takes integers. -1 is a legal word, so only errno tells of a failure.
    unsafe {
        *libc::__errno_location() = 0;
        let word = libc::ptrace(libc::PTRACE_PEEKTEXT, pid, address, 0u64);
        if word == -1 && *libc::__errno_location() != 0 { Err(io::Error::last_os_error()) } else { Ok(word as u64) }
    }
}

fn poke(pid: i32, address: u64, word: u64) -> io::Result<()> {
    ptrace(libc::PTRACE_POKETEXT, pid, address, word).map(drop)
}

fn registers(pid: i32) -> io::Result<libc::user_regs_struct> {
    // SAFETY: the struct is plain integers, so zeroes are a value of it.
    let mut regs: libc::user_regs_struct = unsafe { std::mem::zeroed() };
    ptrace(libc::PTRACE_GETREGS, pid, 0, &raw mut regs as u64)?;
    Ok(regs)
}

fn set_registers(pid: i32, regs: &libc::user_regs_struct) -> io::Result<()> {
    ptrace(libc::PTRACE_SETREGS, pid, 0, regs as *const _ as u64).map(drop)
}

fn wait_for(pid: i32) -> io::Result<i32> {
    let mut status = 0;
    loop {
        // SAFETY: waits for our own child and writes its status into a local.
        if unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_command_runs_as_if_nobody_had_followed_it_and_stops_at_its_code() {
        let mut stops = Vec::new();
        let command = ["sh", "-c", "exit 7"].map(OsString::from);
        let mut child = launch(&command, |pid| {
            stops.push(std::fs::read_to_string(format!("/proc/{}/maps", pid.0)).unwrap().contains("libc.so"));
        })
        .unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(7));
        assert!(!stops[0], "at the exec the C library is not there yet");
        assert!(stops.last().unwrap());
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = launch(&["/no/such/program".into()], |_| {}).unwrap_err();
        assert!(error.to_string().starts_with("cannot run /no/such/program: "), "{error}");
    }
}
