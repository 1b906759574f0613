//! From the fork to the exec: each privilege that the process drops, in the order that the dependencies require.

use std::ffi::CString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use libc::{c_int, c_ulong, c_void};

use crate::machine::stopped::wait_for;
use crate::selective::sandbox::{LOADER, PROGRAM, Refused, at, seccomp};

/// Maximum CPU time of a run, in seconds.
const CPU_SECONDS_MAX: u64 = 20;
/// Maximum address space, in bytes: an arena reserves up to 128 MiB before it is trimmed to 64 MiB, and there are about eight.
const ADDRESS_BYTES_MAX: u64 = 2 << 30;
/// Maximum data size, in bytes. A normal run uses about 10 MB.
const DATA_BYTES_MAX: u64 = 64 << 20;
/// Maximum stack size, in bytes.
const STACK_BYTES_MAX: u64 = 1 << 20;
/// Maximum number of open files: a loader has one open at a time.
const FILES_MAX: u64 = 16;
/// `nobody` and `nogroup` on all distributions; also the kernel's overflow ids.
const NOBODY: libc::uid_t = 65_534;
/// Number of capabilities to drop: they are numbered up to 40 by now, and the kernel rejects unknown ones.
const CAPABILITIES: c_ulong = 64;

/// The child's steps between its birth and its exec, in order.
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
            Self::Trace => "have it traced",
            Self::Root => "change its root (CAP_SYS_CHROOT)",
            Self::Identity => "run it as nobody (CAP_SETUID, CAP_SETGID)",
            Self::Capabilities => "drop its capabilities",
            Self::Limits => "limit its memory and time",
            Self::NoNewRights => "prevent it from gaining privileges",
            Self::DeathSignal => "make it end with fragprof",
            Self::Filter => "filter its system calls",
            Self::Execute => "run its loader",
        }
    }
}

/// Everything that the child needs, prepared before the fork: between fork and exec it must not allocate.
pub(super) struct Plan {
    root: CString,
    null: fs::File,
    loader: CString,
    arguments: [CString; 4],
    filter: Vec<libc::sock_filter>,
}

impl Plan {
    pub(super) fn new(root: &Path) -> io::Result<Self> {
        let text = |text: &str| CString::new(text);
        Ok(Self {
            root: CString::new(root.as_os_str().as_bytes())?,
            null: OpenOptions::new().read(true).write(true).open("/dev/null")?,
            loader: text(&format!("/{LOADER}"))?,
            arguments: [text(LOADER)?, text("--library-path")?, text("/")?, text(&format!("/{PROGRAM}"))?],
            filter: seccomp::filter(),
        })
    }

    /// Starts the child and waits until its loader is about to run; returns its pid.
    pub(super) fn start(&self) -> Result<i32, Refused> {
        let (mut report, reporter) = io::pipe().map_err(at("make a pipe"))?;
        // The child replaces the first three descriptors; if this program was started without them, the pipe could be among them.
        if reporter.as_raw_fd() < 3 {
            return Err(at("make a pipe")(io::Error::other("the standard descriptors are closed")));
        }
        let arguments: [*const libc::c_char; 5] = {
            let [a, b, c, d] = &self.arguments;
            [a.as_ptr(), b.as_ptr(), c.as_ptr(), d.as_ptr(), std::ptr::null()]
        };
        let namespaces = libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWNS;
        // Without CAP_SYS_ADMIN there are no namespaces: the process then still makes no system call for which they would matter.
        let mut pid = -1;
        for flags in [namespaces | libc::SIGCHLD, libc::SIGCHLD] {
            // SAFETY: as fork: memory is copied, and the child continues here with a copy of this thread only. The raw call is used because
            // the C library's would run registered fork handlers.
            pid = unsafe { libc::syscall(libc::SYS_clone, flags as c_ulong, 0, 0, 0, 0) };
            if pid == 0 {
                // SAFETY: this is the child, and the function never returns.
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
            (Ok(_), _) => at("set it up")(io::Error::other("its report is not valid")),
            (Err(error), _) => at("set it up")(error),
        };
        // SAFETY: the child is ours and not reaped, so the number is its own.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        while wait_for(pid).is_ok_and(|status| libc::WIFSTOPPED(status)) {}
        Err(refused)
    }

    /// The child's code up to the exec.
    ///
    /// # Safety
    /// Must only be called in the child of a fork. `arguments` ends with a null pointer and outlives the call. It must not take a lock or
    /// allocate, because other threads may have held a lock at the fork; it only makes system calls.
    unsafe fn become_nobody_and_run(&self, reporter: c_int, arguments: *const *const libc::c_char) -> ! {
        // SAFETY: as required of the caller.
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

    /// All steps except the exec.
    ///
    /// # Safety
    /// As [`Self::become_nobody_and_run`].
    unsafe fn confine(&self, reporter: c_int) -> Result<(), (Step, i32)> {
        let none = 0 as c_ulong;
        // SAFETY: plain system calls with locals and memory of `self`; none of them allocates or locks. Ids are changed by raw calls,
        // because the C library's functions signal all threads that it knows, which do not exist in this process.
        unsafe {
            // No descriptor of ours stays open: 0 to 2 are /dev/null, the reporter closes at the exec.
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
            // After the ids, because changing them clears it.
            check(Step::DeathSignal, libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL as c_ulong, none, none, none).into())?;

            let program = libc::sock_fprog { len: self.filter.len() as u16, filter: self.filter.as_ptr().cast_mut() };
            let filter = libc::SECCOMP_MODE_FILTER as c_ulong;
            check(Step::Filter, libc::prctl(libc::PR_SET_SECCOMP, filter, &raw const program as *const c_void, none, none).into())
        }
    }
}

/// Drops all capabilities, and checks that they are gone.
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
    // SAFETY: the structs match the kernel's headers, and are locals.
    unsafe {
        check(Step::Capabilities, libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL as c_ulong, none, none, none).into())?;
        check(Step::Capabilities, libc::syscall(libc::SYS_capset, &raw mut header, sets.as_ptr()))?;
        check(Step::Capabilities, libc::syscall(libc::SYS_capget, &raw mut header, sets.as_mut_ptr()))?;
    }
    if sets == [0; 6] { Ok(()) } else { Err((Step::Capabilities, libc::EPERM)) }
}

fn errno() -> i32 {
    // SAFETY: the location is the calling thread's own.
    unsafe { *libc::__errno_location() }
}

fn check(step: Step, result: libc::c_long) -> Result<(), (Step, i32)> {
    if result < 0 { Err((step, errno())) } else { Ok(()) }
}
