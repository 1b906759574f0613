//! `make bench-pages`: how long a page takes to show its contents with 200 processes and 24 hours of history.

use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use fragprof::model::view::ProcessesView;
use fragprof::store::Database;
use fragprof::store::write::Writer;

use super::browser::Browser;
use super::{api, page};
use crate::agent::daemon::{Daemon, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::{Process, wait_until};
use crate::support::{build, serial};

/// Number of processes.
const PROCESSES: usize = 200;
const HISTORY_S: i64 = 24 * 3600;
/// The agent's default.
const SAMPLE_EVERY_S: i64 = 30;
/// How often each page is opened; the median counts.
const RUNS: usize = 9;
/// The goal in milliseconds.
const GOAL_MS: f64 = 300.0;

#[test]
#[ignore = "a benchmark: make bench-pages"]
fn time_to_the_contents_of_a_page() {
    let _alone = serial();
    let Some(mut browser) = Browser::start() else { return };
    let sleeper = build::output_dir().join("sleep-bench");
    build::install(Path::new("/bin/sleep"), &sleeper);
    let mut processes: Vec<Process> = (1..PROCESSES).map(|_| Process::start(Command::new(&sleeper).arg("600"))).collect();
    processes.push(fragmented(&fragments("fragments-bench"), &["16"]));
    let own = processes.last().unwrap().pid();
    let directory = tempfile::tempdir().unwrap();
    let config = |rest: &str| watching(&["sleep-bench", "fragments-bench"], rest).replace("full_interval_s = 2", "full_interval_s = 3600");
    // A real agent's list of processes, written 2,880 times with different times.
    let list = {
        let daemon = Daemon::start(&config(""));
        wait_until("a census of each process", || daemon.get("/readyz").status == 200);
        api(&daemon, "/api/v1/processes")
    };
    let view: ProcessesView = serde_json::from_value(list).unwrap();
    let now = i64::try_from(SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()).unwrap();
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let mut writer = Writer::new(Database::open(directory.path()).unwrap(), boot_id.trim().to_owned());
    for at in (now - HISTORY_S..now).step_by(usize::try_from(SAMPLE_EVERY_S).unwrap()) {
        writer.samples(at, &view.processes).unwrap();
    }
    drop(writer);
    let daemon = Daemon::start(&config(&format!("[history]\ndirectory = {:?}", directory.path())));
    wait_until("a census of each process", || daemon.get("/readyz").status == 200);
    // The page is measured, not the censuses of the first minute.
    wait_until("a full census of one of them", || api(&daemon, &format!("/api/v1/processes/{own}"))["ladder"]["pinned_bytes"].is_u64());
    // The time of an empty page is the browser's own share, on a machine that may be busy.
    let mut empty = Vec::new();
    let mut worst: f64 = 0.0;
    for (name, fragment) in [("all processes", String::new()), ("one process, 24 h", format!("#/p/{own}?span=24h"))] {
        let mut times: Vec<f64> = (0..RUNS)
            .map(|_| {
                empty.push(browser.load_ms(&page(&daemon, "healthz")));
                browser.open(&page(&daemon, &fragment));
                browser.eval("performance.getEntriesByName('content')[0].startTime").as_f64().unwrap()
            })
            .collect();
        times.sort_by(f64::total_cmp);
        let median = times[RUNS / 2];
        worst = worst.max(median);
        println!(
            "{name}: {median:.0} ms to its contents (median of {RUNS}, {:.0} to {:.0}), {:.2} × the goal of {GOAL_MS} ms",
            times[0],
            times[RUNS - 1],
            median / GOAL_MS
        );
    }
    empty.sort_by(f64::total_cmp);
    println!("an empty page of the same agent, opened in turn with them: {:.0} ms", empty[empty.len() / 2]);
    browser.open(&page(&daemon, &format!("#/p/{own}?span=24h")));
    browser.wait("the picture", "document.querySelector('canvas')?.dataset.cells > 0");
    let shown = browser.eval("performance.now()").as_f64().unwrap();
    println!("one process with the picture of its address space: {shown:.0} ms");
    let points = api(&daemon, &format!("/api/v1/processes/{own}/history?from=-86400&points=400"))["at_unix_s"].as_array().unwrap().len();
    assert!(points > 300, "{points} points of 24 h");
    assert!(worst <= 4.0 * GOAL_MS, "{worst} ms");
}
