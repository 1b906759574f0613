//! A process: identity, liveness, kind. Reads `/proc/PID`.
//!
//! The identity is (pid, start time): a reused pid has another start time and is never taken for the old process.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

use crate::machine::Machine;
use crate::process::container::{self, Container};
use crate::process::maps::Maps;
use crate::sanitize::terminal;
use crate::units::Pid;

/// Maximum number of bytes read of `/proc/PID/maps`: [`crate::process::maps::MAPPINGS_MAX`] lines of typically about 100 bytes, with room
/// for long paths.
const MAPS_BYTES_MAX: u64 = 256 << 20;
/// Maximum number of bytes read of `stat`, `status` and similar files, which have at most a few KiB.
const SMALL_FILE_BYTES_MAX: u64 = 64 << 10;
/// Milliseconds of a clock tick in `/proc` (USER_HZ is 100 on every machine, include/asm-generic/param.h).
const MS_A_TICK: u64 = 10;
/// PF_KTHREAD of the kernel's `task->flags` (include/linux/sched.h), shown in field 9 of `/proc/PID/stat`.
const PF_KTHREAD: u64 = 0x0020_0000;
/// PF_FORKNOEXEC: forked and has not executed a program since.
const PF_FORKNOEXEC: u64 = 0x40;

/// Why a process cannot be watched.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// No such process.
    #[error("no process with pid {pid}: it has ended, or the pid is of another pid namespace")]
    NotFound {
        /// The requested pid.
        pid: Pid,
    },
    /// The number is a thread's.
    #[error("{tid} is a thread of process {pid}: specify the process, -p {pid}")]
    IsThread {
        /// The requested number.
        tid: Pid,
        /// Its process.
        pid: Pid,
    },
    /// A kernel thread: it has no user memory.
    #[error("pid {pid} ({}) is a kernel thread: it has no heap", terminal(comm))]
    KernelThread {
        /// The requested pid.
        pid: Pid,
        /// Its name.
        comm: String,
    },
    /// Ended, but not yet reaped.
    #[error("pid {pid} ({}) is a zombie: it has ended and waits to be reaped by its parent", terminal(comm))]
    Zombie {
        /// The requested pid.
        pid: Pid,
        /// Its name.
        comm: String,
    },
    /// Not a program for this machine.
    #[error("pid {pid} ({}) is not a 64-bit {machine} program ({found}): only {machine} processes can be watched", terminal(comm), machine = Machine::HOST.name())]
    WrongClass {
        /// The requested pid.
        pid: Pid,
        /// Its name.
        comm: String,
        /// What the ELF header shows.
        found: String,
    },
    /// Permission is missing.
    #[error("no permission to read {path} of pid {pid}: run as root or with CAP_SYS_PTRACE (and in the process's user namespace)")]
    Denied {
        /// The requested pid.
        pid: Pid,
        /// The path that could not be read.
        path: PathBuf,
    },
    /// The process ended while it was being read, or its pid was reused.
    #[error("process {pid} has ended meanwhile")]
    Gone {
        /// The pid.
        pid: Pid,
    },
    /// A `/proc` file is malformed.
    #[error("{path} does not have the expected format")]
    Malformed {
        /// The file.
        path: PathBuf,
    },
    /// Another I/O error.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// Identity of a process. No two processes have the same one until the machine reboots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// The pid in the namespace of the mounted `/proc`.
    pub pid: Pid,
    /// Start time in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_ticks: u64,
}

impl ProcessId {
    /// How long it has run.
    #[must_use]
    pub fn age(&self) -> Duration {
        time_since(self.start_ticks)
    }
}

/// Time since a moment in clock ticks since boot.
fn time_since(ticks: u64) -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let since_boot = Duration::new(u64::try_from(now.tv_sec).unwrap_or(0), u32::try_from(now.tv_nsec).unwrap_or(0));
    since_boot.saturating_sub(Duration::from_millis(ticks.saturating_mul(MS_A_TICK)))
}

/// Contents of `/proc/PID/stat` or `/proc/PID/task/TID/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The name, at most 15 bytes; invalid UTF-8 is replaced.
    pub comm: String,
    /// State letter: `R`, `S`, `D`, `Z`, `T`, `X`, …
    pub state: u8,
    /// The kernel's task flags.
    pub flags: u64,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

impl Stat {
    /// Reads the one below a `/proc` directory of a process or a thread; `None` if there is none any more.
    #[must_use]
    pub fn read(directory: &Path) -> Option<Self> {
        Self::parse(&read_bounded(&directory.join("stat"), SMALL_FILE_BYTES_MAX).ok()?)
    }

    /// Parses `/proc/PID/stat`. The name is in parentheses and may contain any byte, including parentheses and newlines: it ends at the
    /// last closing parenthesis. `None` if the bytes are malformed.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let open = bytes.iter().position(|&b| b == b'(')?;
        let close = bytes.iter().rposition(|&b| b == b')')?;
        let comm = String::from_utf8_lossy(bytes.get(open + 1..close)?).into_owned();
        let rest = std::str::from_utf8(bytes.get(close + 1..)?).ok()?;
        let mut fields = rest.split_ascii_whitespace();
        // Fields are numbered from 1; pid is 1, comm 2, so the first one here is 3 (proc_pid_stat(5)).
        let state = *fields.next()?.as_bytes().first()?;
        let flags = fields.nth(5)?.parse().ok()?;
        let start_ticks = fields.nth(12)?.parse().ok()?;
        Some(Self { comm, state, flags, start_ticks })
    }

    /// How long it has run.
    #[must_use]
    pub fn age(&self) -> Duration {
        time_since(self.start_ticks)
    }

    /// Whether it is a kernel thread.
    #[must_use]
    pub fn is_kernel_thread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Whether it has ended.
    #[must_use]
    pub fn is_dead(&self) -> bool {
        matches!(self.state, b'Z' | b'X' | b'x')
    }
}

/// A process that can be watched.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    comm: String,
    inner_pid: Pid,
    container: Option<Container>,
    directory: PathBuf,
    /// Refers to exactly this process even if its pid is reused; `None` on kernels before 5.3.
    pidfd: Option<OwnedFd>,
}

impl Process {
    /// Opens the process and checks that it can be watched.
    ///
    /// # Errors
    /// [`ProcessError`] says what kind of process it is, or which permission is missing.
    pub fn open(pid: Pid) -> Result<Self, ProcessError> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        let read = |name: &str| {
            let path = directory.join(name);
            read_bounded(&path, SMALL_FILE_BYTES_MAX).map_err(|source| classify(pid, &path, source))
        };
        let stat_path = directory.join("stat");
        // Opens the pidfd first, then reads the pid's start time, then checks that both are still valid: another process cannot have taken
        // the pid in between.
        let pidfd = i32::try_from(pid.0)
            .ok()
            .and_then(rustix::process::Pid::from_raw)
            .and_then(|pid| rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).ok());
        let stat = Stat::parse(&read("stat")?).ok_or(ProcessError::Malformed { path: stat_path })?;
        let status = read("status")?;
        let tgid = status_field(&status, b"Tgid:").and_then(last_number).map_or(pid, Pid);
        if tgid != pid {
            return Err(ProcessError::IsThread { tid: pid, pid: tgid });
        }
        if stat.is_kernel_thread() {
            return Err(ProcessError::KernelThread { pid, comm: stat.comm });
        }
        if stat.is_dead() {
            return Err(ProcessError::Zombie { pid, comm: stat.comm });
        }
        // The last number is the pid in the innermost namespace, the first that in this /proc's.
        let inner_pid = status_field(&status, b"NSpid:").and_then(last_number).map_or(pid, Pid);
        let container = Container::of(&container::read(pid));
        let process =
            Self { id: ProcessId { pid, start_ticks: stat.start_ticks }, comm: stat.comm, inner_pid, container, directory, pidfd };
        process.check_class()?;
        Ok(process)
    }

    /// The peak of its resident bytes; `None` if the kernel does not report it. A forked child starts with its own.
    #[must_use]
    pub fn peak_resident_bytes(&self) -> Option<u64> {
        let status = read_bounded(&self.directory.join("status"), SMALL_FILE_BYTES_MAX).ok()?;
        let field = status_field(&status, b"VmHWM:")?;
        // `VmHWM:     1234 kB`
        let number = std::str::from_utf8(field).ok()?.split_ascii_whitespace().next()?.parse::<u64>().ok()?;
        Some(number.saturating_mul(1024))
    }

    /// Its identity.
    #[must_use]
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// The pid in the namespace of the mounted `/proc`.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.id.pid
    }

    /// The pid in the process's innermost pid namespace, which names `/tmp/perf-PID.map`.
    #[must_use]
    pub fn inner_pid(&self) -> Pid {
        self.inner_pid
    }

    /// The container it was in when it was opened, from its cgroup only: without the names that only the runtime knows.
    #[must_use]
    pub fn container(&self) -> Option<&Container> {
        self.container.as_ref()
    }

    /// The name of its main thread when it was opened.
    #[must_use]
    pub fn comm(&self) -> &str {
        &self.comm
    }

    /// Whether a signal or a debugger has stopped it.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        Stat::read(&self.directory).is_some_and(|stat| matches!(stat.state, b'T' | b't'))
    }

    /// Whether a thread of this program traces it; false for a process that has ended.
    #[must_use]
    pub fn is_traced_by_us(&self) -> bool {
        let status = read_bounded(&self.directory.join("status"), SMALL_FILE_BYTES_MAX).unwrap_or_default();
        // The kernel reports the tracing thread's id, not its process's (task_state, fs/proc/array.c).
        let tracer = status_field(&status, b"TracerPid:").and_then(last_number).filter(|tid| *tid != 0);
        tracer.is_some_and(|tid| self.directory.with_file_name("self").join(format!("task/{tid}")).exists())
    }

    /// Whether it has executed a program since it was forked; false for a process that cannot be read.
    #[must_use]
    pub fn has_executed(&self) -> bool {
        Stat::read(&self.directory).is_some_and(|stat| stat.flags & PF_FORKNOEXEC == 0)
    }

    /// `/proc/PID`.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A descriptor of the process that becomes readable (poll) once it has ended; `None` before Linux 5.3.
    #[must_use]
    pub fn pidfd(&self) -> Option<&OwnedFd> {
        self.pidfd.as_ref()
    }

    /// Whether it is still running: the pid exists with the same start time, and is not a zombie.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        Stat::read(&self.directory).is_some_and(|stat| stat.start_ticks == self.id.start_ticks && !stat.is_dead())
    }

    /// Its current mappings.
    ///
    /// # Errors
    /// If the process has ended or the permission to read is missing.
    pub fn maps(&self) -> Result<Maps, ProcessError> {
        let path = self.directory.join("maps");
        let bytes = read_bounded(&path, MAPS_BYTES_MAX).map_err(|source| classify(self.id.pid, &path, source))?;
        if !self.is_alive() {
            return Err(ProcessError::Gone { pid: self.id.pid });
        }
        Ok(Maps::parse(&bytes))
    }

    fn check_class(&self) -> Result<(), ProcessError> {
        let path = self.directory.join("exe");
        let mut header = [0u8; 20];
        let mut file = File::open(&path).map_err(|source| classify(self.id.pid, &path, source))?;
        if file.read_exact(&mut header).is_err() {
            return Err(ProcessError::Malformed { path });
        }
        match foreign_class(header) {
            None => Ok(()),
            Some(found) => Err(ProcessError::WrongClass { pid: self.id.pid, comm: self.comm.clone(), found }),
        }
    }
}

/// The class and machine of a program, from the first bytes of its file (e_ident's EI_CLASS and e_machine); `None` if it is for this
/// machine.
fn foreign_class(header: [u8; 20]) -> Option<String> {
    const ELF_CLASS_32: u8 = 1;
    const ELF_CLASS_64: u8 = 2;
    let machine = u16::from_le_bytes([header[18], header[19]]);
    match (header[4], machine) {
        (ELF_CLASS_64, machine) if Machine::from_elf(machine) == Some(Machine::HOST) => None,
        (ELF_CLASS_32, machine) => Some(format!("32-bit, ELF machine {machine}")),
        (_, machine) => Some(format!("ELF machine {machine}")),
    }
}

/// Reads at most `bytes_max` bytes of a file whose size `/proc` does not report.
pub(crate) fn read_bounded(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(crate) fn classify(pid: Pid, path: &Path, source: io::Error) -> ProcessError {
    match source.raw_os_error() {
        // ESRCH occurs if the file was opened before the process ended.
        Some(libc::ENOENT | libc::ESRCH) if !Path::new(&format!("/proc/{pid}/stat")).exists() => ProcessError::NotFound { pid },
        Some(libc::ESRCH) => ProcessError::Gone { pid },
        Some(libc::EACCES | libc::EPERM) => ProcessError::Denied { pid, path: path.to_path_buf() },
        _ => ProcessError::Io { path: path.to_path_buf(), source },
    }
}

fn status_field<'a>(status: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    status.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(name))
}

fn last_number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.split_ascii_whitespace().last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::process::Command;

    use super::*;
    use crate::process::testing::Cat;

    #[test]
    fn a_name_with_parentheses_and_a_newline_does_not_confuse_stat() {
        let line = b"77 (a) R (b\n c) S 1 77 77 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 123456 1000 200 18446744073709551615\n";
        let stat = Stat::parse(line).unwrap();
        assert_eq!(stat, Stat { comm: "a) R (b\n c".into(), state: b'S', flags: 4_194_560, start_ticks: 123_456 });
        assert!(!stat.is_kernel_thread());
    }

    #[test]
    fn a_truncated_stat_is_rejected() {
        let line = b"77 (cat) S 1 77 77 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0 123456";
        assert!(Stat::parse(line).is_some());
        for len in 0..line.len() - 6 {
            assert_eq!(Stat::parse(&line[..len]), None, "{len}");
        }
    }

    #[test]
    fn a_running_process_is_opened_and_its_end_noticed() {
        let mut cat = Cat::start(Path::new("/bin/cat"), None);
        let process = Process::open(cat.pid()).unwrap();
        assert!(process.is_alive());
        assert!(process.maps().unwrap().executable_files().count() > 0);
        cat.end();
        assert!(!process.is_alive());
        assert!(matches!(process.maps(), Err(ProcessError::NotFound { .. })));
    }

    #[test]
    fn a_zombie_is_reported_as_a_zombie() {
        let mut child = Command::new("true").spawn().unwrap();
        let pidfd = rustix::process::pidfd_open(
            rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(),
            rustix::process::PidfdFlags::empty(),
        )
        .unwrap();
        rustix::event::poll(&mut [rustix::event::PollFd::new(&pidfd, rustix::event::PollFlags::IN)], None).unwrap();
        assert!(matches!(Process::open(Pid(child.id())), Err(ProcessError::Zombie { .. })));
        child.wait().unwrap();
    }

    #[test]
    fn a_program_of_another_kind_is_recognised_by_its_header() {
        let header = |class, machine: u16| {
            let mut header = [0; 20];
            header[..5].copy_from_slice(&[0x7f, b'E', b'L', b'F', class]);
            header[18..].copy_from_slice(&machine.to_le_bytes());
            header
        };
        assert_eq!(foreign_class(header(2, 62)), None);
        // i386, x32 (64-bit instructions, 32-bit pointers) and AArch64.
        assert_eq!(foreign_class(header(1, 3)).unwrap(), "32-bit, ELF machine 3");
        assert_eq!(foreign_class(header(1, 62)).unwrap(), "32-bit, ELF machine 62");
        assert_eq!(foreign_class(header(2, 183)).unwrap(), "ELF machine 183");
    }

    #[test]
    fn a_thread_is_not_taken_for_a_process() {
        let tid = std::thread::spawn(|| {
            let tid = Pid(u32::try_from(rustix::thread::gettid().as_raw_nonzero().get()).unwrap());
            Process::open(tid).map(|_| ()).map_err(|error| (error, tid))
        });
        let (error, tid) = tid.join().unwrap().unwrap_err();
        assert!(matches!(error, ProcessError::IsThread { tid: t, pid } if t == tid && pid.0 == std::process::id()));
    }

    #[test]
    fn a_missing_permission_is_named_with_its_file() {
        let path = Path::new("/proc/1/exe");
        for code in [libc::EACCES, libc::EPERM] {
            let error = classify(Pid(1), path, io::Error::from_raw_os_error(code));
            assert!(error.to_string().contains("/proc/1/exe of pid 1") && error.to_string().contains("CAP_SYS_PTRACE"), "{error}");
        }
    }

    #[test]
    fn a_kernel_thread_is_recognised_by_its_flag() {
        let line = b"2 (kthreadd) S 0 0 0 0 -1 2129984 0 0 0 0 0 0 0 0 20 0 1 0 5 0 0\n";
        assert!(Stat::parse(line).unwrap().is_kernel_thread());
    }

    #[test]
    fn an_unused_pid_is_not_found() {
        // pid_max is at most 2^22.
        assert!(matches!(Process::open(Pid(1 << 23)), Err(ProcessError::NotFound { .. })));
    }
}
