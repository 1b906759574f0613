//! A process in which a foreign C library and its loader can do no harm, whatever they are: everything below is set up before their first
//! instruction, and where one part cannot be, nothing is run.
//!
//! | it cannot | because |
//! |---|---|
//! | read or change files | its root is a folder with three files that it may not write; it opens for reading only |
//! | use rights | it is nobody, without groups and capabilities, and can gain none (`no_new_privs`) |
//! | reach other processes | it makes no such system call; where the kernel lets us, it does not see them either (pid, net, IPC, mount namespaces) |
//! | start others | `fork`, `clone` and a second `execve` do not happen; RLIMIT_NPROC is 0 |
//! | attack the kernel broadly | two dozen system calls, see `seccomp` |
//! | use much memory or time | limits on address space, data and CPU seconds; a watchdog kills it by the clock |
//! | outlive us | PR_SET_PDEATHSIG and PTRACE_O_EXITKILL; it is killed and reaped when [`Sandbox`] is dropped |
//! | learn of us | it inherits no descriptor, no environment |
//!
//! The process is traced from its birth. Design 0011 has the argument.

use std::ffi::{CString, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use libc::{c_int, c_ulong, c_void};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::seccomp;
use crate::machine::stopped::{ptrace, wait_for};

/// Wall-clock time of a run. A good one takes some two seconds, on a machine with nothing left to give many times that.
const RUN_TIME_MAX: Duration = Duration::from_secs(120);
/// CPU time of a run, in seconds.
const CPU_SECONDS_MAX: u64 = 20;
/// Address space, in bytes: an arena reserves up to 128 MiB before it is cut to 64, and there are about eight.
const ADDRESS_BYTES_MAX: u64 = 2 << 30;
/// Memory that it can fill, in bytes. A good run fills some 10 MB.
const DATA_BYTES_MAX: u64 = 64 << 20;
/// Bytes of its stack.
const STACK_BYTES_MAX: u64 = 1 << 20;
/// Open files: a loader has one at a time.
const FILES_MAX: u64 = 16;
/// `nobody` and `nogroup`, on all distributions; also the kernel's overflow ids.
const NOBODY: libc::uid_t = 65_534;
/// Capability numbers reach to 40 by now; the kernel refuses those it does not know.
const CAPABILITIES: c_ulong = 64;

const LOADER: &str = "ld-linux-x86-64.so.2";
const LIBRARY: &str = "libc.so.6";
const PROGRAM: &str = "scratch";

/// Why a process could not be set up.
#[derive(Debug)]
pub(super) struct Refused {
    pub step: &'static str,
    pub source: io::Error,
}

/// Says which step an error belongs to.
fn at(step: &'static str) -> impl Fn(io::Error) -> Refused {
    move |source| Refused { step, source }
}

/// The process, stopped at the first instruction of its loader. It is killed and reaped, and its files are removed, when this is dropped.
pub(super) struct Sandbox {
    pid: i32,
    reaped: bool,
    library: FileNumber,
    loader: FileNumber,
    watchdog: Option<Watchdog>,
    root: Option<Root>,
}

/// A file's inode number, by which its mappings are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileNumber(pub u64);

impl Sandbox {
    /// Starts `program` under `loader`, with `library` as its C library. Its root is made in the first of `folders` that will do.
    pub(super) fn start(folders: &[PathBuf], loader: &[u8], library: &[u8], program: &[u8]) -> Result<Self, Refused> {
        Self::start_for(RUN_TIME_MAX, folders, loader, library, program)
    }

    fn start_for(time: Duration, folders: &[PathBuf], loader: &[u8], library: &[u8], program: &[u8]) -> Result<Self, Refused> {
        let root = Root::make(folders).map_err(at("make a folder for it"))?;
        let write = at("write its files");
        let loader = root.add(LOADER, loader, 0o555).map_err(&write)?;
        let library = root.add(LIBRARY, library, 0o444).map_err(&write)?;
        root.add(PROGRAM, program, 0o555).map_err(&write)?;
        root.close().map_err(&write)?;
        let plan = Plan::new(&root.0).map_err(at("prepare it"))?;
        let pid = plan.start()?;
        // From here on it is killed and reaped by the drop.
        let mut sandbox = Self { pid, reaped: false, library, loader, watchdog: None, root: Some(root) };
        sandbox.watchdog = Some(Watchdog::start(pid, time).map_err(at("watch its time"))?);
        sandbox.await_loader()?;
        Ok(sandbox)
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// The copy of the C library, as its mappings show it.
    pub(super) fn library(&self) -> FileNumber {
        self.library
    }

    /// The copy of the loader, as its mappings show it.
    pub(super) fn loader(&self) -> FileNumber {
        self.loader
    }

    /// Whether the watchdog killed it.
    pub(super) fn timed_out(&self) -> bool {
        self.watchdog.as_ref().is_some_and(|watchdog| watchdog.barked.load(Ordering::SeqCst))
    }

    /// Removes its files, which it has mapped by now: nothing is left of them if this program is killed.
    pub(super) fn remove_files(&mut self) {
        drop(self.root.take());
    }

    /// To be told when `wait_for` has reaped it.
    pub(super) fn note_reaped(&mut self) {
        self.reaped = true;
    }

    /// The stop at the exec; from then on it dies with its tracer.
    fn await_loader(&mut self) -> Result<(), Refused> {
        let failed = at("trace it");
        let status = wait_for(self.pid).map_err(&failed)?;
        if !libc::WIFSTOPPED(status) {
            self.reaped = true;
            return Err(failed(io::Error::other("it ended before its loader ran")));
        }
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD;
        ptrace(libc::PTRACE_SETOPTIONS, self.pid, 0, options as u64).map_err(&failed)?;
        // What cannot be killed when its time is over is not let run.
        // SAFETY: the child is ours and not reaped; signal 0 only asks whether another could be sent.
        if unsafe { libc::kill(self.pid, 0) } != 0 {
            return Err(at("be sure to end it (CAP_KILL)")(io::Error::last_os_error()));
        }
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if !self.reaped {
            // SAFETY: the child is ours and not reaped, so the number is its own.
            if unsafe { libc::kill(self.pid, libc::SIGKILL) } != 0 {
                // Without CAP_KILL it has never run: a tracer needs no right to end what stands still.
                let _ = ptrace(libc::PTRACE_KILL, self.pid, 0, 0);
            }
            // A stop that was on its way may come before the end.
            while wait_for(self.pid).is_ok_and(|status| libc::WIFSTOPPED(status)) {}
        }
        drop(self.watchdog.take());
    }
}

/// Kills the process when its time is over.
struct Watchdog {
    barked: Arc<AtomicBool>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    fn start(pid: i32, time: Duration) -> io::Result<Self> {
        let process = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        // By descriptor: the number may be another's by the time it is used.
        let process: OwnedFd = pidfd_open(process, PidfdFlags::empty())?;
        let (stop, stopped) = channel::<()>();
        let barked = Arc::new(AtomicBool::new(false));
        let shared = Arc::clone(&barked);
        let thread = std::thread::Builder::new().name("fragprof-scratch".into()).spawn(move || {
            if stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout) {
                shared.store(true, Ordering::SeqCst);
                // It may have ended at this very moment.
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
        })?;
        Ok(Self { barked, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It does nothing that panics.
            let _ = thread.join();
        }
    }
}

/// The folder that is the process's root.
struct Root(PathBuf);

impl Root {
    fn make(folders: &[PathBuf]) -> io::Result<Self> {
        let mut refused = io::Error::other("there is none to make it in");
        for folder in folders {
            match Self::make_in(folder) {
                Ok(root) => return Ok(root),
                Err(error) => refused = io::Error::other(format!("{}: {error}", folder.display())),
            }
        }
        Err(refused)
    }

    fn make_in(folder: &Path) -> io::Result<Self> {
        if rustix::fs::statvfs(folder)?.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC) {
            return Err(io::Error::other("mounted noexec"));
        }
        let template = folder.join("fragprof-scratch-XXXXXX");
        let mut template = CString::new(template.as_os_str().as_bytes())?.into_bytes_with_nul();
        // SAFETY: the template is writable, ends with a zero, and outlives the call. The folder is new, ours, and open to us alone.
        if unsafe { libc::mkdtemp(template.as_mut_ptr().cast()) }.is_null() {
            return Err(io::Error::last_os_error());
        }
        template.pop();
        Ok(Self(PathBuf::from(OsString::from_vec(template))))
    }

    fn add(&self, name: &str, bytes: &[u8], mode: u32) -> io::Result<FileNumber> {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.0.join(name))?;
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        Ok(FileNumber(file.metadata()?.ino()))
    }

    /// Nobody may write in it; anybody may look names up in it.
    fn close(&self) -> io::Result<()> {
        fs::set_permissions(&self.0, fs::Permissions::from_mode(0o711))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        for name in [LOADER, LIBRARY, PROGRAM] {
            drop(fs::remove_file(self.0.join(name)));
        }
        if let Err(error) = fs::remove_dir(&self.0) {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// What the child does between its birth and its exec, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Step {
    Descriptors = 1,
    Trace,
    Root,
    Identity,
    Capabilities,
    Limits,
    NoNewRights,
    DeathSignal,
    Filter,
    Execute,
}

impl Step {
    const ALL: [Self; 10] = [
        Self::Descriptors,
        Self::Trace,
        Self::Root,
        Self::Identity,
        Self::Capabilities,
        Self::Limits,
        Self::NoNewRights,
        Self::DeathSignal,
        Self::Filter,
        Self::Execute,
    ];

    /// What could not be done.
    fn text(self) -> &'static str {
        match self {
            Self::Descriptors => "close its descriptors",
            Self::Trace => "let it be traced",
            Self::Root => "change its root (CAP_SYS_CHROOT)",
            Self::Identity => "make it nobody's (CAP_SETUID, CAP_SETGID)",
            Self::Capabilities => "take its capabilities away",
            Self::Limits => "limit its memory and time",
            Self::NoNewRights => "keep it from gaining rights",
            Self::DeathSignal => "bind its life to ours",
            Self::Filter => "filter its system calls",
            Self::Execute => "run its loader",
        }
    }
}

/// Everything that the child needs, made before it is born: between birth and exec it must not allocate.
struct Plan {
    root: CString,
    null: fs::File,
    loader: CString,
    arguments: [CString; 4],
    filter: Vec<libc::sock_filter>,
}

impl Plan {
    fn new(root: &Path) -> io::Result<Self> {
        let text = |text: &str| CString::new(text);
        Ok(Self {
            root: CString::new(root.as_os_str().as_bytes())?,
            null: OpenOptions::new().read(true).write(true).open("/dev/null")?,
            loader: text(&format!("/{LOADER}"))?,
            arguments: [text(LOADER)?, text("--library-path")?, text("/")?, text(&format!("/{PROGRAM}"))?],
            filter: seccomp::filter(),
        })
    }

    /// Starts the child and waits until its loader is about to run; its pid.
    fn start(&self) -> Result<i32, Refused> {
        let (mut report, reporter) = io::pipe().map_err(at("make a pipe"))?;
        // The first three are replaced in the child; a program that was started without them would have the pipe there.
        if reporter.as_raw_fd() < 3 {
            return Err(at("make a pipe")(io::Error::other("the standard descriptors are closed")));
        }
        let arguments: [*const libc::c_char; 5] = {
            let [a, b, c, d] = &self.arguments;
            [a.as_ptr(), b.as_ptr(), c.as_ptr(), d.as_ptr(), std::ptr::null()]
        };
        let namespaces = libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWNS;
        // Without CAP_SYS_ADMIN there are none: it then makes no system call that they would matter to.
        let mut pid = -1;
        for flags in [namespaces | libc::SIGCHLD, libc::SIGCHLD] {
            // SAFETY: as fork: memory is copied, the child goes on here with a copy of this thread alone. The raw call, because the C
            // library's would run what is registered for forks.
            pid = unsafe { libc::syscall(libc::SYS_clone, flags as c_ulong, 0, 0, 0, 0) };
            if pid == 0 {
                // SAFETY: this is the child, and it ends in there.
                unsafe { self.become_nobody_and_run(reporter.as_raw_fd(), arguments.as_ptr()) }
            }
            if pid > 0 {
                break;
            }
        }
        if pid < 0 {
            return Err(at("start it")(io::Error::last_os_error()));
        }
        let pid = pid as i32;
        drop(reporter);
        let mut message = Vec::new();
        // Ends at the exec, which closes the pipe, or when the child has ended.
        let read = report.read_to_end(&mut message);
        let refused = match (read, &*message) {
            (Ok(0), _) => return Ok(pid),
            (Ok(_), &[step, a, b, c, d]) => {
                let step = Step::ALL.into_iter().find(|known| *known as u8 == step).map_or("set it up", Step::text);
                Refused { step, source: io::Error::from_raw_os_error(i32::from_ne_bytes([a, b, c, d])) }
            }
            (Ok(_), _) => at("set it up")(io::Error::other("it said nothing sensible")),
            (Err(error), _) => at("set it up")(error),
        };
        // SAFETY: the child is ours and not reaped, so the number is its own.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        while wait_for(pid).is_ok_and(|status| libc::WIFSTOPPED(status)) {}
        Err(refused)
    }

    /// The child's life up to the exec.
    ///
    /// # Safety
    /// To be called in the child of a fork only. `arguments` ends with a null pointer and outlives the call. No lock may be taken and
    /// nothing allocated here, because other threads may have held one at the fork; only system calls are made.
    unsafe fn become_nobody_and_run(&self, reporter: c_int, arguments: *const *const libc::c_char) -> ! {
        // SAFETY: as the caller's.
        let (step, error) = unsafe {
            match self.confine(reporter) {
                Ok(()) => {
                    let environment = [std::ptr::null::<libc::c_char>()];
                    libc::execve(self.loader.as_ptr(), arguments, environment.as_ptr());
                    (Step::Execute, errno())
                }
                Err(failed) => failed,
            }
        };
        let [a, b, c, d] = error.to_ne_bytes();
        let message = [step as u8, a, b, c, d];
        // SAFETY: the message is a local; then the process ends.
        unsafe {
            libc::write(reporter, message.as_ptr().cast(), message.len());
            libc::_exit(127)
        }
    }

    /// All steps but the exec.
    ///
    /// # Safety
    /// As [`Self::become_nobody_and_run`].
    unsafe fn confine(&self, reporter: c_int) -> Result<(), (Step, i32)> {
        let none = 0 as c_ulong;
        // SAFETY: plain system calls with locals and memory of `self`; none of them allocates or locks. Ids are changed by the raw calls,
        // because the C library's ask all threads that it remembers, of which this process has none.
        unsafe {
            // Nothing of ours stays open: 0 to 2 are /dev/null, the reporter closes at the exec.
            let null = self.null.as_raw_fd();
            for standard in 0..3 {
                check(Step::Descriptors, libc::dup2(null, standard).into())?;
            }
            let (below, above) = (reporter.unsigned_abs().saturating_sub(1), reporter.unsigned_abs() + 1);
            if below >= 3 {
                check(Step::Descriptors, libc::syscall(libc::SYS_close_range, 3u32, below, 0u32))?;
            }
            check(Step::Descriptors, libc::syscall(libc::SYS_close_range, above, u32::MAX, 0u32))?;

            check(Step::Trace, libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0))?;

            check(Step::Root, libc::chdir(self.root.as_ptr()).into())?;
            check(Step::Root, libc::chroot(c".".as_ptr()).into())?;
            check(Step::Root, libc::chdir(c"/".as_ptr()).into())?;

            // Without CAP_SETPCAP they stay in the bounding set, from which nothing can be gained with `no_new_privs`.
            for capability in 0..CAPABILITIES {
                libc::prctl(libc::PR_CAPBSET_DROP, capability, none, none, none);
            }
            check(Step::Identity, libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()))?;
            check(Step::Identity, libc::syscall(libc::SYS_setresgid, NOBODY, NOBODY, NOBODY))?;
            check(Step::Identity, libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY))?;
            let (mut real, mut effective, mut saved) = (0, 0, 0);
            check(Step::Identity, libc::getresuid(&raw mut real, &raw mut effective, &raw mut saved).into())?;
            if [real, effective, saved] != [NOBODY; 3] {
                return Err((Step::Identity, libc::EPERM));
            }
            drop_capabilities()?;

            let limits = [
                (libc::RLIMIT_CPU, CPU_SECONDS_MAX),
                (libc::RLIMIT_AS, ADDRESS_BYTES_MAX),
                (libc::RLIMIT_DATA, DATA_BYTES_MAX),
                (libc::RLIMIT_STACK, STACK_BYTES_MAX),
                (libc::RLIMIT_FSIZE, 0),
                (libc::RLIMIT_NOFILE, FILES_MAX),
                (libc::RLIMIT_NPROC, 0),
                (libc::RLIMIT_CORE, 0),
                (libc::RLIMIT_MEMLOCK, 0),
                (libc::RLIMIT_MSGQUEUE, 0),
            ];
            for (resource, most) in limits {
                let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
                check(Step::Limits, libc::setrlimit(resource, &raw const limit).into())?;
            }

            check(Step::NoNewRights, libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as c_ulong, none, none, none).into())?;
            // After the ids: changing those takes it back.
            check(Step::DeathSignal, libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as c_ulong, none, none, none).into())?;

            let program = libc::sock_fprog { len: self.filter.len() as u16, filter: self.filter.as_ptr().cast_mut() };
            let filter = libc::SECCOMP_MODE_FILTER as c_ulong;
            check(Step::Filter, libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program as *const c_void, none, none).into())
        }
    }
}

/// Drops all capabilities, and looks whether they are gone.
///
/// # Safety
/// As [`Plan::become_nobody_and_run`].
unsafe fn drop_capabilities() -> Result<(), (Step, i32)> {
    /// `_LINUX_CAPABILITY_VERSION_3` of include/uapi/linux/capability.h; its header and data.
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    const VERSION_3: u32 = 0x2008_0522;
    let none = 0 as c_ulong;
    let mut header = Header { version: VERSION_3, pid: 0 };
    // Effective, permitted, inheritable; low and high words.
    let mut sets = [0u32; 6];
    // SAFETY: the structs are as the kernel's headers have them, and locals.
    unsafe {
        check(Step::Capabilities, libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong, none, none, none).into())?;
        check(Step::Capabilities, libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()))?;
        check(Step::Capabilities, libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()))?;
    }
    if sets == [0; 6] { Ok(()) } else { Err((Step::Capabilities, libc::EPERM)) }
}

fn errno() -> i32 {
    // SAFETY: the calling thread's own.
    unsafe { *libc::__errno_location() }
}

fn check(step: Step, result: libc::c_long) -> Result<(), (Step, i32)> {
    if result < 0 { Err((step, errno())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::process::Command;
    use std::time::Instant;

    use super::*;

    fn folders() -> [PathBuf; 1] {
        [std::env::temp_dir()]
    }

    /// A program that does nothing for ever.
    fn endless() -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("endless.c"), folder.path().join("endless"));
        fs::write(&source, "void _start(void) { for (;;) __asm__ volatile(\"\"); }").unwrap();
        let mut compiler = Command::new("cc");
        let built = compiler.args(["-static", "-nostdlib", "-o"]).arg(&program).arg(&source).status().unwrap();
        assert!(built.success());
        fs::read(&program).unwrap()
    }

    #[test]
    fn a_process_that_never_ends_is_killed_by_the_clock_and_nothing_is_left_of_it() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: a sandbox cannot be made without root");
            return;
        }
        let endless = endless();
        let began = Instant::now();
        let mut sandbox = Sandbox::start_for(Duration::from_millis(300), &folders(), &endless, b"", b"").unwrap();
        let (pid, root) = (sandbox.pid(), sandbox.root.as_ref().unwrap().0.clone());
        assert!(root.exists());
        ptrace(libc::PTRACE_CONT, pid, 0, 0).unwrap();
        let status = wait_for(pid).unwrap();
        sandbox.note_reaped();
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
        assert!(sandbox.timed_out());
        assert!(began.elapsed() >= Duration::from_millis(300));
        drop(sandbox);
        assert!(!root.exists());

        // Also one that runs, or stands still, when it is no longer wanted.
        for runs in [true, false] {
            let sandbox = Sandbox::start(&folders(), &endless, b"", b"").unwrap();
            let pid = sandbox.pid();
            if runs {
                ptrace(libc::PTRACE_CONT, pid, 0, 0).unwrap();
            }
            drop(sandbox);
            assert!(wait_for(pid).is_err(), "it is still our child");
        }
    }

    #[test]
    fn a_folder_that_will_not_do_is_passed_over_and_named_if_there_is_no_other() {
        let good = tempfile::tempdir().unwrap();
        let folders = [PathBuf::from("/proc"), "/no/such/folder".into(), good.path().to_owned()];
        let root = Root::make(&folders).unwrap();
        assert!(root.0.starts_with(good.path()));
        drop(root);
        assert_eq!(fs::read_dir(good.path()).unwrap().count(), 0);
        let refused = Root::make(&folders[..2]).err().unwrap();
        assert!(refused.to_string().contains("/no/such/folder"), "{refused}");
    }

    #[test]
    fn the_process_is_nobody_without_rights_before_its_first_instruction() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: a sandbox cannot be made without root");
            return;
        }
        let sandbox = Sandbox::start(&folders(), &endless(), b"", b"").unwrap();
        let status = fs::read_to_string(format!("/proc/{}/status", sandbox.pid())).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.unwrap().split_whitespace().collect::<Vec<_>>()
        };
        assert_eq!((field("Uid"), field("Gid")), (vec!["65534"; 4], vec!["65534"; 4]));
        assert!(field("Groups").is_empty());
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(set), ["0000000000000000"], "{set}");
        }
        assert_eq!((field("NoNewPrivs"), field("Seccomp")), (vec!["1"], vec!["2"]));
        let open: Vec<_> = fs::read_dir(format!("/proc/{}/fd", sandbox.pid())).unwrap().map(|fd| fd.unwrap().path()).collect();
        assert!(open.iter().all(|fd| fs::read_link(fd).unwrap() == Path::new("/dev/null")) && open.len() == 3, "{open:?}");
        let environment = fs::read(format!("/proc/{}/environ", sandbox.pid())).unwrap();
        assert!(environment.is_empty());
        let root = fs::read_link(format!("/proc/{}/root", sandbox.pid())).unwrap();
        assert_eq!(root, sandbox.root.as_ref().unwrap().0);
        for space in ["pid", "net", "ipc", "mnt"] {
            let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{space}")).unwrap();
            assert_ne!(of(&sandbox.pid().to_string()), of("self"), "{space}");
        }
    }
}
