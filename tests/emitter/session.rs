//! One agent, three recordings at once: an emitter's, windows, and every call on request, over programs that are loaded once.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::time::Duration;

use libbpf_rs::query::ProgInfoIter;
use serde_json::Value;
use tempfile::TempDir;

use super::programs::{compile, sampled};
use crate::agent::daemon::{Daemon, value, watching};
use crate::governed::built;
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, bpf, serial};

/// The BPF programs that a process holds, itself or by links, by name.
fn programs_of(pid: u32) -> BTreeMap<String, BTreeSet<u32>> {
    let names: BTreeMap<u32, String> = ProgInfoIter::default().map(|info| (info.id, info.name.to_string_lossy().into_owned())).collect();
    let mut held: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
    for file in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten() {
        let Ok(text) = std::fs::read_to_string(file.path()) else { continue };
        let id = text.lines().find_map(|line| line.strip_prefix("prog_id:")).and_then(|id| id.trim().parse().ok());
        if let Some((id, name)) = id.and_then(|id: u32| Some((id, names.get(&id)?))) {
            held.entry(name.clone()).or_default().insert(id);
        }
    }
    held
}

/// Sum of the allocations of stacks with a function.
fn allocations(profile: &Value, function: &str) -> u64 {
    let stacks = profile["stacks"].as_array().unwrap().iter();
    let of = stacks.filter(|stack| stack["frames"].as_array().unwrap().iter().any(|frame| frame["function"] == function));
    of.map(|stack| stack["allocations"].as_u64().unwrap()).sum()
}

#[test]
fn an_emitter_windows_and_every_call_are_recorded_at_once_over_programs_that_are_loaded_once() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let told = Process::start_piped(sampled(&compile(folder.path(), "ages.c", "ages_session", &["-O2"]), 32 << 10).args(["16", "16"]));
    told.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    // 25 allocations of three sites each millisecond, and half of the time computing.
    let paced = Process::start(Command::new(built("paced")).args(["1", "3600", "500"]));
    let rest = "[listening]\nprofile_interval_s = 1\ncpu_percent = 100.0\n[governed]\nenabled = true\nbudget_percent = 5.0\ncpu_percent = \
                100.0\n[profile]\non_demand = true\nseconds_max = 10";
    let daemon = Daemon::start(&watching(&["ages_session", "governed-paced"], rest));
    let label = |process: &Process| format!("pid=\"{}\"", process.pid());
    daemon.metrics_with("fragprof_process_samples_total", &label(&told));
    let windows = || value(&daemon.metrics(), "fragprof_governor_windows_total", "end=\"time\"").unwrap_or(0.0);
    wait_until("a window of the other one", || windows() > 0.0);

    let path = format!("/api/v1/processes/{}/profile?seconds=3&by=allocated&format=stacks", paced.pid());
    let (recorded, held) = std::thread::scope(|scope| {
        let recorded = scope.spawn(|| daemon.get(&path));
        let mut held: BTreeMap<String, BTreeSet<u32>> = BTreeMap::new();
        while !recorded.is_finished() {
            for (name, ids) in programs_of(daemon.process.pid()) {
                held.entry(name).or_default().extend(ids);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        (recorded.join().unwrap(), held)
    });
    assert!(held.len() > 5 && held.values().all(|ids| ids.len() == 1), "loaded more than once: {held:?}");
    assert_eq!(recorded.status, 200, "{}", recorded.body);

    // Windows that were open did not take calls from it, nor it from them: a tick is 20 short-lived blocks and one that is kept.
    let profile: Value = serde_json::from_str(&recorded.body).unwrap();
    let (short, kept) = (allocations(&profile, "site_short"), allocations(&profile, "site_kept"));
    assert!(kept > 1000 && short.abs_diff(20 * kept) <= 40, "{short} short, {kept} kept\n{}", recorded.body);
    assert!(profile["losses"].as_object().is_some_and(|losses| losses.values().all(|lost| lost == 0)), "{}", profile["losses"]);

    // They continue afterwards, and so does the listening.
    let before = windows();
    wait_until("another window", || windows() > before);
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_listener_targets", ""), Some(1.0));
}
