//! Podman with storage of its own, and containers that are removed when dropped.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::build::{Link, install, program, tool};
use crate::support::process::wait_until;

/// Options for a machine whose root may not raise limits, and whose cgroups are hybrid: see docs/kubernetes.md.
pub const QUIRKS: [&str; 7] = [
    "--network=none",
    "--ulimit=nofile=20000:20000",
    "--ulimit=nproc=4096:4096",
    "--security-opt=seccomp=unconfined",
    "--security-opt=apparmor=unconfined",
    "--log-driver=none",
    "--runtime=runc",
];

/// A podman of the test's own.
pub struct Podman {
    directory: TempDir,
}

impl Podman {
    /// `None` where podman or runc is not installed.
    pub fn new() -> Option<Self> {
        tool("podman")?;
        tool("runc")?;
        Some(Self { directory: tempfile::tempdir().unwrap() })
    }

    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new("podman");
        let of = |name: &str| self.directory.path().join(name);
        command.arg("--root").arg(of("storage")).arg("--runroot").arg(of("run")).arg("--tmpdir").arg(of("tmp"));
        command.args(["--storage-driver=overlay", "--cgroup-manager=cgroupfs", "--events-backend=none"]);
        command.arg(verb);
        // Its monitor reports a kill for lack of memory in a file in its working directory.
        command.current_dir(self.directory.path());
        command
    }

    pub fn done(&self, command: &mut Command) -> String {
        let done = command.stdin(std::process::Stdio::null()).output().unwrap();
        assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8(done.stdout).unwrap().trim().to_owned()
    }

    /// Makes an image of programs with the libraries they need and nothing else, not even a shell.
    pub fn image(&self, name: &str, programs: &[(&Path, &str)]) {
        self.image_that(name, programs, &[]);
    }

    /// As [`Podman::image`], with a default command.
    pub fn image_that(&self, name: &str, programs: &[(&Path, &str)], words: &[&str]) {
        let tree = tempfile::tempdir().unwrap();
        for (program, to) in programs {
            let at = |path: &str| tree.path().join(path.trim_start_matches('/'));
            copy(program, &at(to));
            for library in libraries(program) {
                copy(&library, &at(&library.display().to_string()));
            }
        }
        std::fs::create_dir_all(tree.path().join("tmp")).unwrap();
        let archive = tree.path().with_extension("tar");
        let mut tar = Command::new("tar");
        self.done(tar.arg("-C").arg(tree.path()).arg("-cf").arg(&archive).arg("."));
        self.done(
            self.command("import").arg("--quiet").arg(format!("--change=CMD {words:?}")).arg(&archive).arg(format!("localhost/{name}")),
        );
        std::fs::remove_file(archive).unwrap();
    }

    /// The image of the agent: the program under test and its libraries, or the static program of `make test-containers`.
    pub fn agent_image(&self) {
        let program = std::env::var_os("FRAGPROF_IMAGE_PROGRAM").unwrap_or_else(|| env!("CARGO_BIN_EXE_fragprof").into());
        self.image("fragprof", &[(Path::new(&program), "/usr/bin/fragprof")]);
    }

    /// Runs a container in the background.
    pub fn run(&self, options: &[&str], image: &str, words: &[&str]) -> Container<'_> {
        let mut command = self.command("run");
        command.arg("--detach").args(QUIRKS).args(options).arg(format!("localhost/{image}")).args(words);
        let id = self.done(&mut command);
        let id = id.lines().last().unwrap().to_owned();
        Container { podman: self, id }
    }

    /// Runs a container to its end and returns what it printed.
    pub fn run_to_end(&self, options: &[&str], image: &str, words: &[&str]) -> (bool, String) {
        let mut command = self.command("run");
        // Attached: its output arrives here.
        command.arg("--rm").args(QUIRKS).args(options).arg(format!("localhost/{image}")).args(words);
        let done = command.stdin(std::process::Stdio::null()).output().unwrap();
        (done.status.success(), format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr)))
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        // Its mounts would keep the directory from being removed.
        let _ = self.command("rm").args(["--all", "--force", "--time=0"]).output();
        let _ = Command::new("umount").arg("-R").arg(self.directory.path().join("storage/overlay")).output();
    }
}

/// A container, killed and removed when dropped.
pub struct Container<'a> {
    podman: &'a Podman,
    pub id: String,
}

impl Container<'_> {
    /// The pid of its first process in the machine's namespace.
    pub fn pid(&self) -> u32 {
        let said = self.podman.done(self.podman.command("inspect").args(["--format", "{{.State.Pid}}", &self.id]));
        said.parse().unwrap()
    }

    pub fn remove(&self) {
        self.podman.done(self.podman.command("rm").args(["--force", "--time=0", &self.id]));
    }
}

impl Drop for Container<'_> {
    fn drop(&mut self) {
        let _ = self.podman.command("rm").args(["--force", "--time=0", &self.id]).output();
    }
}

/// The program of the tests that holds memory in two functions, by libc.
pub fn holder(link: Link) -> PathBuf {
    program("container_heap", link)
}

/// The number of pause(2).
#[cfg(target_arch = "x86_64")]
const PAUSE: libc::c_long = libc::SYS_pause;
/// arm64 has no system call of that name.
#[cfg(not(target_arch = "x86_64"))]
const PAUSE: libc::c_long = libc::SYS_ppoll;

/// Waits until a process sleeps in pause(2): it has all its memory.
pub fn wait_until_paused(pid: u32) {
    wait_until(&format!("process {pid} to be idle"), || {
        std::fs::read_to_string(format!("/proc/{pid}/syscall")).is_ok_and(|text| text.starts_with(&format!("{PAUSE} ")))
    });
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    install(from, to);
}

/// The libraries of a program, by the dynamic loader itself; none of a static one.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let Ok(done) = Command::new("ldd").arg(program).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    // Of a program of another C library it prints errors.
    let path = |line: &str| line.split_whitespace().find(|word| word.starts_with('/')).map(PathBuf::from).filter(|path| path.is_file());
    text.lines().filter_map(path).collect()
}
