//! `fragprof sampler` with a real systemd, which runs in namespaces of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::build::{LIB_DIR, tool};
use crate::support::process::{Done, Process, run, wait_until};
use crate::support::skip;

/// A systemd with no unit but the test's.
struct Systemd {
    process: Process,
    /// Its first process, as seen from here.
    first: u32,
    /// The control group that it has for itself, on hierarchies of version 1.
    group: Option<PathBuf>,
    _directory: TempDir,
}

impl Systemd {
    /// `None` where systemd is not installed, or the user may not make namespaces.
    fn start() -> Option<Self> {
        for name in ["systemctl", "systemd-analyze", "unshare", "nsenter"] {
            tool(name)?;
        }
        if !rustix::process::getuid().is_root() {
            return skip("namespaces need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let named = Path::new("/sys/fs/cgroup/systemd");
        let group = named.is_dir().then(|| named.join(format!("fragprof-test-{}", std::process::id())));
        if let Some(group) = &group {
            fs::create_dir_all(group).unwrap();
        }
        let enter = "[ -z \"$GROUP\" ] || echo $$ >\"$GROUP/cgroup.procs\"; exec unshare --mount --pid --ipc --uts --cgroup --fork --kill-child \"$@\"";
        let home = Path::new(env!("CARGO_MANIFEST_DIR"));
        let script = home.join("tests/sampler/systemd.sh");
        let process = Process::start(
            Command::new("sh")
                .args(["-c", enter, "sh"])
                .arg(script)
                .arg(directory.path())
                .arg(home)
                .env("GROUP", group.as_deref().unwrap_or(Path::new(""))),
        );
        let children = format!("/proc/{0}/task/{0}/children", process.pid());
        let mut started = Self { process, first: 0, group, _directory: directory };
        wait_until("systemd to answer", || {
            let Some(first) = fs::read_to_string(&children).unwrap_or_default().split_whitespace().next().and_then(|pid| pid.parse().ok())
            else {
                return false;
            };
            started.first = first;
            fs::read_to_string(format!("/proc/{first}/comm")).is_ok_and(|comm| comm.trim() == "systemd")
                && started.try_command("systemctl", &["show", "--property=Version"]).status.success()
        });
        Some(started)
    }

    /// Runs a command in its namespaces and on its files.
    fn try_command(&self, program: &str, words: &[&str]) -> Done {
        let target = format!("--target={}", self.first);
        run(Command::new("nsenter")
            .arg(target)
            .args(["--mount", "--pid", "--ipc", "--uts", "--cgroup", "--root", "--wd", program])
            .args(words))
    }

    fn command(&self, program: &str, words: &[&str]) -> String {
        let done = self.try_command(program, words);
        assert!(done.status.success(), "{program} {words:?}: {}\n{}\n{}", done.out, done.err, self.process.err);
        done.out
    }

    fn fragprof(&self, words: &[&str]) -> String {
        self.command(env!("CARGO_BIN_EXE_fragprof"), &[&["sampler"], words].concat())
    }

    /// The reason for which a unit is refused.
    fn refusal(&self, words: &[&str]) -> String {
        let done = self.try_command(env!("CARGO_BIN_EXE_fragprof"), &[&["sampler"], words].concat());
        assert_eq!(done.status.code(), Some(3), "{words:?}: {}\n{}", done.out, done.err);
        done.err
    }

    fn path(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root{path}", self.first))
    }

    /// Makes a unit known; `service` is its section.
    fn unit(&self, name: &str, service: &str) {
        fs::write(self.path(&format!("/etc/systemd/system/{name}")), format!("[Unit]\nDescription=x\n[Service]\n{service}\n")).unwrap();
    }

    fn value(&self, unit: &str, property: &str) -> String {
        self.command("systemctl", &["show", "--value", &format!("--property={property}"), unit]).trim().to_owned()
    }

    /// What the unit's main process preloads, and whether it has the library.
    fn preload(&self, unit: &str) -> (Option<String>, bool) {
        let pid = self.value(unit, "MainPID");
        assert_ne!(pid, "0", "{unit}: {}", self.value(unit, "Result"));
        // Between fork and exec it is systemd itself.
        let of = |file: &str| self.command("cat", &[&format!("/proc/{pid}/{file}")]);
        wait_until("the program to be executed", || !of("comm").contains("systemd") && !of("comm").starts_with('('));
        let preload = of("environ").split('\0').find_map(|line| line.strip_prefix("LD_PRELOAD=").map(str::to_owned));
        (preload, of("maps").contains("/libfragprof_sampler"))
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        self.process.signal(rustix::process::Signal::KILL);
        let _ = self.process.wait(crate::support::LIMIT);
        if let Some(group) = &self.group {
            wait_until("its control groups to be empty", || {
                remove_groups(group);
                !group.exists()
            });
        }
    }
}

fn remove_groups(group: &Path) {
    for entry in fs::read_dir(group).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir()) {
        remove_groups(&entry.path());
    }
    let _ = fs::remove_dir(group);
}

const LIBRARY: &str = "/usr/lib/fragprof/libfragprof_sampler.so";

#[test]
fn a_unit_has_the_sampler_from_its_next_start_on_until_it_is_disabled() {
    let Some(systemd) = Systemd::start() else { return };
    systemd.unit("plain.service", "ExecStart=/usr/bin/sleep infinity");
    systemd.command("systemctl", &["daemon-reload"]);
    systemd.command("systemctl", &["start", "plain"]);
    assert_eq!(systemd.preload("plain"), (None, false));
    let pid = systemd.value("plain", "MainPID");
    let before = systemd.command("systemctl", &["cat", "plain"]);

    let said = systemd.fragprof(&["enable", "plain", "--sample-bytes", "4096"]);
    assert!(said.contains("after a restart: systemctl try-restart 'plain.service'"), "{said}");
    // Nothing is restarted unasked, and systemd knows what is on disk.
    assert_eq!((systemd.value("plain", "MainPID"), systemd.value("plain", "NeedDaemonReload")), (pid, "no".to_owned()));
    assert!(systemd.fragprof(&["status"]).contains("runs without it: restart the unit"));
    assert_eq!(systemd.value("plain", "DropInPaths"), "/etc/systemd/system/plain.service.d/zz-fragprof-sampler.conf");
    let verified = systemd.try_command("systemd-analyze", &["verify", "plain.service"]);
    assert!(verified.status.success() && !verified.err.contains("fragprof"), "{}", verified.err);

    systemd.command("systemctl", &["restart", "plain"]);
    assert_eq!(systemd.preload("plain"), (Some(LIBRARY.to_owned()), true));
    assert!(systemd.value("plain", "Environment").contains("FRAGPROF_SAMPLE_BYTES=4096"));
    assert!(systemd.fragprof(&["status", "plain"]).contains("runs with the sampler"));

    systemd.fragprof(&["disable", "plain", "--restart"]);
    assert_eq!(systemd.preload("plain"), (None, false));
    assert_eq!(systemd.command("systemctl", &["cat", "plain"]), before);
    assert!(!systemd.path("/etc/systemd/system/plain.service.d").exists());
    assert!(systemd.refusal(&["status", "plain"]).contains("not_enabled"));
}

#[test]
fn what_a_unit_preloads_by_itself_stays_behind_the_sampler() {
    let Some(systemd) = Systemd::start() else { return };
    let jemalloc = format!("{LIB_DIR}/libjemalloc.so.2");
    systemd.unit("setting.service", &format!("ExecStart=/usr/bin/sleep infinity\nEnvironment=LD_PRELOAD={jemalloc}"));
    systemd.unit("file.service", "ExecStart=/usr/bin/sleep infinity\nEnvironmentFile=/etc/file.env");
    fs::write(systemd.path("/etc/file.env"), format!("LD_PRELOAD={jemalloc}\n")).unwrap();
    systemd.unit("worker@.service", "ExecStart=/usr/bin/sleep infinity");
    systemd.command("systemctl", &["daemon-reload"]);
    for unit in ["setting", "file"] {
        systemd.fragprof(&["enable", unit]);
        systemd.command("systemctl", &["start", unit]);
        let expected = format!("/usr/lib/fragprof/libfragprof_sampler_jemalloc.so:{jemalloc}");
        assert_eq!(systemd.preload(unit), (Some(expected), true), "{unit}");
    }
    systemd.command("systemctl", &["start", "worker@1"]);
    let said = systemd.fragprof(&["enable", "worker@", "--runtime", "--restart"]);
    assert!(said.contains("/run/systemd/system/worker@.service.d/"), "{said}");
    assert_eq!(systemd.preload("worker@1"), (Some(LIBRARY.to_owned()), true));
    systemd.command("systemctl", &["start", "worker@2"]);
    assert_eq!(systemd.preload("worker@2"), (Some(LIBRARY.to_owned()), true));
    assert!(systemd.fragprof(&["status", "worker@2"]).contains("runs with the sampler, until the next reboot"));
    systemd.fragprof(&["disable", "worker@"]);
    // Those that run go on as they are.
    assert_eq!(systemd.preload("worker@2"), (Some(LIBRARY.to_owned()), true));
    systemd.command("systemctl", &["restart", "worker@2"]);
    assert_eq!(systemd.preload("worker@2"), (None, false));
}

#[test]
fn a_musl_program_is_started_and_what_cannot_be_sampled_is_refused_by_name() {
    let Some(systemd) = Systemd::start() else { return };
    let build = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let code = build.path().join("pauses.c");
    fs::write(&code, "#include <stdlib.h>\n#include <unistd.h>\nint main(void) { free(malloc(1)); for (;;) pause(); }\n").unwrap();
    let built = |compiler: &str, name: &str, flags: &[&str]| {
        let out = build.path().join(name);
        let done = run(Command::new(compiler).arg(&code).args(flags).arg("-o").arg(&out));
        assert!(done.status.success(), "{}", done.err);
        out.display().to_string()
    };
    let musl = built("musl-gcc", "musl", &[]);
    let sanitized = built("cc", "sanitized", &["-fsanitize=address"]);
    let other = built("aarch64-linux-gnu-gcc", "other", &[]);
    let set = built("cc", "set", &[]);
    fs::set_permissions(&set, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).unwrap();
    let still = built("cc", "static", &["-static"]);
    for (name, program) in [("musl", &musl), ("sanitizer", &sanitized), ("architecture", &other), ("privileged", &set), ("static", &still)]
    {
        systemd.unit(&format!("{name}.service"), &format!("ExecStart={program}"));
    }
    systemd.unit("gone.service", "ExecStart=/nonexistent/program");
    systemd.command("systemctl", &["daemon-reload"]);
    systemd.fragprof(&["enable", "musl", "--restart"]);
    systemd.command("systemctl", &["start", "musl"]);
    assert_eq!(systemd.preload("musl"), (Some(LIBRARY.to_owned()), true));
    for name in ["sanitizer", "architecture", "privileged", "static"] {
        let reason = systemd.refusal(&["enable", name]);
        assert!(reason.contains(&format!("{name}.service is not enabled ({name})")), "{name}: {reason}");
    }
    assert!(systemd.refusal(&["enable", "gone"]).contains("(not_found)"));
    assert!(systemd.refusal(&["enable", "unheard-of"]).contains("(unknown_unit)"));
    for bad in ["../x", "a/b"] {
        let done = systemd.try_command(env!("CARGO_BIN_EXE_fragprof"), &["sampler", "enable", bad]);
        assert_eq!(done.status.code(), Some(2), "{}", done.err);
    }
    // None of the refused has a drop-in.
    let listed = systemd.fragprof(&["status", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["units"].as_array().unwrap().iter().map(|one| one["unit"].as_str().unwrap()).collect::<Vec<_>>(), ["musl.service"]);
}
