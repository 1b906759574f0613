//! A process in which an untrusted C library and its loader can do no harm: everything below is set up before their first instruction, and
//! if one part cannot be set up, nothing is run.
//!
//! | it cannot | because |
//! |---|---|
//! | read or change files | its root is a directory with three files and without write permission; it can open files for reading only |
//! | use privileges | it runs as nobody, without groups and capabilities, and cannot gain any (`no_new_privs`) |
//! | reach other processes | no such system call is allowed; where permitted, it does not see them (pid, net, IPC, mount namespaces) |
//! | start others | `fork`, `clone` and a second `execve` are blocked; RLIMIT_NPROC is 0 |
//! | attack the kernel broadly | two dozen system calls are allowed, see `seccomp` |
//! | use much memory or time | limits on address space, data and CPU seconds; a watchdog kills it after a wall-clock limit |
//! | outlive fragprof | PR_SET_PDEATHSIG and PTRACE_O_EXITKILL; it is killed and reaped when [`Sandbox`] is dropped |
//! | obtain information | it inherits no descriptor and no environment |
//!
//! The process is traced from its birth. Design note 0011 has the reasons.

mod birth;
mod root;
mod watchdog;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use birth::Plan;
use root::Root;
use watchdog::Watchdog;

use crate::machine::stopped::{ptrace, wait_for};
use crate::selective::seccomp;

/// Maximum wall-clock time of a run. A normal one takes about two seconds, many times that on a machine without idle CPU time.
const RUN_TIME_MAX: Duration = Duration::from_secs(120);
const LOADER: &str = "ld-linux-x86-64.so.2";
const LIBRARY: &str = "libc.so.6";
const PROGRAM: &str = "scratch";

/// Why a process could not be set up.
#[derive(Debug)]
pub(super) struct Refused {
    pub step: &'static str,
    pub source: io::Error,
}

/// Adds the failed step to an error.
fn at(step: &'static str) -> impl Fn(io::Error) -> Refused {
    move |source| Refused { step, source }
}

/// The process, stopped at the first instruction of its loader. When this is dropped, it is killed and reaped, and its files are removed.
pub(super) struct Sandbox {
    pid: i32,
    reaped: bool,
    library: FileNumber,
    loader: FileNumber,
    watchdog: Option<Watchdog>,
    root: Option<Root>,
}

/// A file's inode number, which identifies its mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FileNumber(pub u64);

impl Sandbox {
    /// Starts `program` under `loader`, with `library` as its C library. Its root is created in the first suitable directory of `folders`.
    pub(super) fn start(folders: &[PathBuf], loader: &[u8], library: &[u8], program: &[u8]) -> Result<Self, Refused> {
        Self::start_for(RUN_TIME_MAX, folders, loader, library, program)
    }

    fn start_for(time: Duration, folders: &[PathBuf], loader: &[u8], library: &[u8], program: &[u8]) -> Result<Self, Refused> {
        let root = Root::make(folders).map_err(at("create a directory for it"))?;
        let write = at("write its files");
        let loader = root.add(LOADER, loader, 0o555).map_err(&write)?;
        let library = root.add(LIBRARY, library, 0o444).map_err(&write)?;
        root.add(PROGRAM, program, 0o555).map_err(&write)?;
        root.close().map_err(&write)?;
        let plan = Plan::new(root.path()).map_err(at("prepare it"))?;
        let pid = plan.start()?;
        // From here on the drop kills and reaps it.
        let mut sandbox = Self { pid, reaped: false, library, loader, watchdog: None, root: Some(root) };
        sandbox.watchdog = Some(Watchdog::start(pid, time).map_err(at("limit its run time"))?);
        sandbox.await_loader()?;
        Ok(sandbox)
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// The copy of the C library, as identified in its mappings.
    pub(super) fn library(&self) -> FileNumber {
        self.library
    }

    /// The copy of the loader, as identified in its mappings.
    pub(super) fn loader(&self) -> FileNumber {
        self.loader
    }

    /// Whether the watchdog killed it.
    pub(super) fn timed_out(&self) -> bool {
        self.watchdog.as_ref().is_some_and(|watchdog| watchdog.barked())
    }

    /// Removes its files, which are mapped by now: nothing remains of them if this program is killed.
    pub(super) fn remove_files(&mut self) {
        drop(self.root.take());
    }

    /// Must be called after `wait_for` has reaped it.
    pub(super) fn note_reaped(&mut self) {
        self.reaped = true;
    }

    /// Waits for the stop at the exec; from then on it is killed if its tracer ends.
    fn await_loader(&mut self) -> Result<(), Refused> {
        let failed = at("trace it");
        let status = wait_for(self.pid).map_err(&failed)?;
        if !libc::WIFSTOPPED(status) {
            self.reaped = true;
            return Err(failed(io::Error::other("it ended before its loader ran")));
        }
        let options = libc::PTRACE_O_EXITKILL | libc::PTRACE_O_TRACEEXEC | libc::PTRACE_O_TRACESYSGOOD;
        ptrace(libc::PTRACE_SETOPTIONS, self.pid, 0, options as u64).map_err(&failed)?;
        // A process that cannot be killed when its time is up must not run.
        // SAFETY: the child is ours and not reaped; signal 0 only checks whether a signal could be sent.
        if unsafe { libc::kill(self.pid, 0) } != 0 {
            return Err(at("get permission to kill it (CAP_KILL)")(io::Error::last_os_error()));
        }
        Ok(())
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if !self.reaped {
            // SAFETY: the child is ours and not reaped, so the number is its own.
            if unsafe { libc::kill(self.pid, libc::SIGKILL) } != 0 {
                // Without CAP_KILL it has never run: a tracer needs no permission to end a stopped process.
                let _ = ptrace(libc::PTRACE_KILL, self.pid, 0, 0);
            }
            // A pending stop may be reported before the end.
            while wait_for(self.pid).is_ok_and(|status| libc::WIFSTOPPED(status)) {}
        }
        drop(self.watchdog.take());
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::fs;
    use std::path::Path;
    use std::process::Command;
    use std::time::Instant;

    use super::*;

    fn folders() -> [PathBuf; 1] {
        [std::env::temp_dir()]
    }

    /// A program that loops forever.
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
    fn a_process_that_never_ends_is_killed_after_the_time_limit_and_nothing_is_left_of_it() {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: a sandbox cannot be made without root");
            return;
        }
        let endless = endless();
        let began = Instant::now();
        let mut sandbox = Sandbox::start_for(Duration::from_millis(300), &folders(), &endless, b"", b"").unwrap();
        let (pid, root) = (sandbox.pid(), sandbox.root.as_ref().unwrap().path().to_owned());
        assert!(root.exists());
        ptrace(libc::PTRACE_CONT, pid, 0, 0).unwrap();
        let status = wait_for(pid).unwrap();
        sandbox.note_reaped();
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL, "{status:#x}");
        assert!(sandbox.timed_out());
        assert!(began.elapsed() >= Duration::from_millis(300));
        drop(sandbox);
        assert!(!root.exists());

        // Including one that is running, or stopped, when it is dropped.
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
    fn an_unsuitable_directory_is_skipped_and_named_if_there_is_no_other() {
        let good = tempfile::tempdir().unwrap();
        let folders = [PathBuf::from("/proc"), "/no/such/folder".into(), good.path().to_owned()];
        let root = Root::make(&folders).unwrap();
        assert!(root.path().starts_with(good.path()));
        drop(root);
        assert_eq!(fs::read_dir(good.path()).unwrap().count(), 0);
        let refused = Root::make(&folders[..2]).err().unwrap();
        assert!(refused.to_string().contains("/no/such/folder"), "{refused}");
    }

    #[test]
    fn the_process_is_nobody_without_privileges_before_its_first_instruction() {
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
        assert_eq!(root, sandbox.root.as_ref().unwrap().path());
        for space in ["pid", "net", "ipc", "mnt"] {
            let of = |process: &str| fs::read_link(format!("/proc/{process}/ns/{space}")).unwrap();
            assert_ne!(of(&sandbox.pid().to_string()), of("self"), "{space}");
        }
    }
}
