//! The history of a running agent: after a kill, on a full disk, on the command line.

use std::path::Path;
use std::process::Command;

use rustix::process::Signal;
use serde_json::Value;

use crate::agent::daemon::{Daemon, value, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::LIMIT;
use crate::support::process::{run, wait_until};

fn fragprof(args: &[&str]) -> Value {
    let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(args));
    assert!(done.status.success(), "{args:?}: {}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

fn samples(daemon: &Daemon) -> f64 {
    value(&daemon.metrics(), "fragprof_history_written_total", "kind=\"sample\"").unwrap_or(0.0)
}

#[test]
fn committed_samples_survive_a_kill_and_are_read_by_the_commands() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().to_str().unwrap();
    let target = fragmented(&fragments("surfaces-kill"), &["16"]);
    let config = watching(&["surfaces-kill"], &format!("[history]\ndirectory = {directory:?}\nsample_interval_s = 1"));
    let mut daemon = Daemon::start(&config);
    wait_until("samples on the disk", || samples(&daemon) >= 3.0);
    daemon.process.signal(Signal::KILL);
    daemon.process.wait(LIMIT);
    let pid = target.pid().to_string();
    let history = fragprof(&["report", "--since", "200s", "--history", directory, "--pid", &pid, "--json"]);
    assert!(history["at_unix_s"].as_array().unwrap().len() >= 3, "{history}");
    assert!(history["pinned_bytes"].as_array().unwrap().iter().filter_map(Value::as_u64).all(|bytes| bytes > 10 << 20), "{history}");
    let changed = fragprof(&["diff", "--from", "1h", "--to", "now", "--history", directory, "--pid", &pid, "--json"]);
    assert_eq!(changed["delta_bytes"]["pinned_bytes"], 0, "{changed}");
    let all = fragprof(&["report", "--since", "1h", "--history", directory, "--json"]);
    assert_eq!(all["processes"]["processes"][0]["pid"].as_u64(), Some(u64::from(target.pid())));
    let tables = place.path().join("tables");
    let mut export = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    export.args(["export", "--history", directory, "--format", "parquet", "--since", "7d", "-o"]).arg(&tables);
    let done = run(&mut export);
    assert!(done.status.success() && done.out.lines().count() == 3, "{} {}", done.out, done.err);
    let rows: u64 = done.out.lines().next().unwrap().rsplit_once(": ").unwrap().1.trim_end_matches(" rows").parse().unwrap();
    assert!(rows >= 3, "{}", done.out);
    assert!(std::fs::read(tables.join("ladder.parquet")).unwrap().ends_with(b"PAR1"));
    for wrong in [vec!["export", "--history", directory, "--format", "json"], vec!["export", "x.pb.gz", "--format", "parquet"]] {
        let done = run(Command::new(env!("CARGO_BIN_EXE_fragprof")).args(&wrong));
        assert_eq!(done.status.code(), Some(2), "{wrong:?}: {}", done.err);
    }
    // The next agent continues with it.
    let daemon = Daemon::start(&config);
    wait_until("further samples", || samples(&daemon) >= 2.0);
    let known = daemon.get(&format!("/api/v1/processes/{pid}/history?from=-200")).body;
    let known: Value = serde_json::from_str(&known).unwrap();
    assert!(known["at_unix_s"].as_array().unwrap().len() >= 4, "{known}");
}

/// Modes of the history's files.
fn modes(directory: &Path) -> Vec<(String, u32)> {
    let mut all: Vec<(String, u32)> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| {
            let mode = std::os::unix::fs::PermissionsExt::mode(&entry.metadata().unwrap().permissions()) & 0o777;
            (entry.file_name().to_string_lossy().into_owned(), mode)
        })
        .collect();
    all.sort();
    all
}

#[test]
fn a_history_damaged_in_its_middle_is_set_aside_and_a_new_one_is_private_and_merged_at_the_end() {
    let place = tempfile::tempdir().unwrap();
    let directory = place.path().join("history");
    let file = directory.join("history.db");
    let _target = fragmented(&fragments("surfaces-torn"), &["16"]);
    let config = watching(&["surfaces-torn"], &format!("[history]\ndirectory = {directory:?}\nsample_interval_s = 1"));
    // SAFETY: the mask is this test process's, whose other files have explicit modes; it is restored.
    let before = unsafe { libc::umask(0) };
    let mut daemon = Daemon::start(&config);
    // SAFETY: as above.
    unsafe { libc::umask(before) };
    wait_until("samples on the disk", || samples(&daemon) >= 2.0);
    let all = modes(&directory);
    assert!(all.len() >= 3 && all.iter().all(|(_, mode)| *mode == 0o600), "{all:?}");

    // While the agent is stopped: the log is merged, so that the file's own pages are read; all pages but the first are destroyed; and
    // there is another writer, so that the agent does not keep using the pages that it has in memory.
    let sqlite = |statement: &str| {
        let done = run(Command::new("sqlite3").arg(&file).arg(statement));
        assert!(done.status.success(), "{statement}: {}", done.err);
    };
    daemon.process.signal(Signal::STOP);
    sqlite("PRAGMA wal_checkpoint(TRUNCATE)");
    let pages = std::fs::metadata(&file).unwrap().len() / 4096;
    let mut dd = Command::new("dd");
    dd.args(["if=/dev/urandom", "bs=4096", "seek=1", "conv=notrunc"])
        .arg(format!("count={}", pages - 1))
        .arg(format!("of={}", file.display()));
    assert!(run(&mut dd).status.success());
    sqlite("PRAGMA application_id = 7");
    daemon.process.signal(Signal::CONT);
    let set_aside = |daemon: &Daemon| value(&daemon.metrics(), "fragprof_history_set_aside_total", "") == Some(1.0);
    wait_until("the damaged file to be set aside", || set_aside(&daemon));
    assert!(directory.join("history.db.broken").exists());
    let written = samples(&daemon);
    wait_until("samples in the new file", || samples(&daemon) >= written + 2.0);
    assert_eq!(value(&daemon.metrics(), "fragprof_history_failing", ""), Some(0.0));
    assert!(set_aside(&daemon), "once is enough: {}", daemon.process.err);

    daemon.process.signal(Signal::TERM);
    assert!(daemon.process.wait(LIMIT).success());
    let all = modes(&directory);
    assert!(all.iter().all(|(name, mode)| *mode == 0o600 && name != "history.db-wal"), "{all:?}");
    let checked = run(Command::new("sqlite3").arg(&file).arg("PRAGMA integrity_check; SELECT count(*) >= 2 FROM sample;"));
    assert_eq!(checked.out.lines().collect::<Vec<_>>(), ["ok", "1"], "{}", checked.err);
}

/// A file system of one MiB, unmounted when dropped.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Self {
        let place = tempfile::tempdir().unwrap();
        let done = run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "none"]).arg(place.path()));
        assert!(done.status.success(), "{}", done.err);
        Self(place)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_disk_is_counted_and_loses_no_committed_samples() {
    let disk = SmallDisk::mount();
    let target = fragmented(&fragments("surfaces-full"), &["16"]);
    let directory = disk.path().to_str().unwrap();
    let daemon = Daemon::start(&watching(&["surfaces-full"], &format!("[history]\ndirectory = {directory:?}\nsample_interval_s = 1")));
    wait_until("a sample on the disk", || samples(&daemon) >= 2.0);
    let filler = disk.path().join("filler");
    // Fills the remaining space.
    let _ = std::fs::write(&filler, vec![0; 4 << 20]);
    let read = || -> Value {
        serde_json::from_str(&daemon.get(&format!("/api/v1/processes/{}/history?from=-200", target.pid())).body).unwrap_or_default()
    };
    wait_until("an error", || value(&daemon.metrics(), "fragprof_history_write_errors_total", "").unwrap_or(0.0) >= 1.0);
    assert_eq!(value(&daemon.metrics(), "fragprof_history_failing", ""), Some(1.0));
    let before = read()["at_unix_s"].as_array().map_or(0, Vec::len);
    assert!(before >= 2, "{}", read());
    assert_eq!(daemon.get("/healthz").status, 200);
    std::fs::remove_file(&filler).unwrap();
    wait_until("writing again", || value(&daemon.metrics(), "fragprof_history_failing", "") == Some(0.0));
    wait_until("a further sample", || read()["at_unix_s"].as_array().map_or(0, Vec::len) > before);
}
