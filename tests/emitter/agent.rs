//! The agent listens to emitters by itself, all the time: live bytes by stack on every surface, with their source.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use fragprof::profile::{Mode, ValueKind, pprof};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::programs::{compile, sampled};
use super::report::Estimates;
use crate::agent::daemon::{Daemon, value, watching};
use crate::support::build::install;
use crate::support::process::{Process, wait_until};
use crate::support::{LIMIT, bpf, serial};

fn json(daemon: &Daemon, path: &str) -> Option<Value> {
    let answer = daemon.get(path);
    (answer.status == 200).then(|| serde_json::from_str(&answer.body).unwrap())
}

/// A heap with a past, made by `ages.c`, of some MiB before and some since.
fn aged(program: &std::path::Path) -> Process {
    let process = Process::start_piped(sampled(program, 32 << 10).args(["16", "16"]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    process
}

/// Watches programs of these names: each test has its own, because others may run at the same time.
fn listening(names: &[&str], rest: &str) -> String {
    watching(names, &format!("[listening]\nprofile_interval_s = 1\ncensus_interval_s = 1\ncpu_percent = 100.0\n{rest}"))
}

#[test]
fn the_agent_listens_to_an_emitter_and_every_surface_shows_live_bytes_by_stack_and_their_source() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let mut process = aged(&compile(folder.path(), "ages.c", "ages_told", &["-O2"]));
    let plain = Process::start_piped(Command::new(compile(folder.path(), "ages.c", "ages_plain", &["-O2"])).arg("1"));
    let pid = process.pid();
    let daemon = Daemon::start(&listening(&["ages_told", "ages_plain"], "[governed]\nenabled = true"));
    let label = format!("pid=\"{pid}\"");
    daemon.metrics_with("fragprof_process_samples_total", &label);
    // The census of the start is in the ledger before anything changes.
    let path = format!("/api/v1/processes/{pid}");
    let profile = |by: &str| json(&daemon, &format!("{path}/profile?by={by}&format=stacks"));
    wait_until("a profile with a census", || profile("pinned").is_some_and(|got| got["stacks"].to_string().contains("[before attach]")));

    let mut input = process.input();
    input.write_all(b"g").unwrap();
    let line = process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    let truth = |site: &str| -> f64 { words.chunks(2).find(|pair| pair[0] == site).unwrap()[1].parse().unwrap() };
    let close = |got: &Estimates, site: &str| got.of_function("inuse_bytes", site).deviation(truth(site)).abs() < 4.0;
    wait_until("live bytes allocated since are reported by stack", || {
        profile("live").is_some_and(|got| close(&Estimates(got.clone()), "site_small") && close(&Estimates(got), "site_large"))
    });
    let got = profile("live").unwrap();
    assert_eq!(got["mode"], "sampled");
    // On average: call sites have distances of their own.
    let distance = got["processes"][0]["sample_bytes"].as_f64().unwrap();
    assert!((f64::from(16 << 10)..f64::from(64 << 10)).contains(&distance), "{distance}");
    assert!(got["totals"]["pinned_bytes_est"].as_u64().is_some(), "{}", got["totals"]);

    // The scraper's path, the process's page, the verdict and the metrics.
    let scraped = daemon.get_bytes(&format!("/debug/pprof/heap?pid={pid}"));
    let read = pprof::read(scraped.as_slice()).unwrap();
    assert_eq!(read.meta.mode, Mode::Sampled);
    assert!(read.totals().get(ValueKind::InuseSpace) > 8 << 20);
    // The distance is compared above and below: it is a mean, and the sampler makes it longer where samples would cost too much.
    let source = "otel_memory in libfragprof_sampler.so, one sample per ";
    let view = json(&daemon, &path).unwrap();
    assert!(view["profiles"][0]["source"].as_str().is_some_and(|said| said.contains(source)), "{}", view["profiles"]);
    assert_eq!(view["rates"]["mode"], "sampled");
    let explained = json(&daemon, &format!("{path}/explain")).unwrap();
    assert!(explained["sources"].to_string().contains(source), "{}", explained["sources"]);
    let text = daemon.metrics();
    assert_eq!(value(&text, "fragprof_listener_targets", ""), Some(1.0), "the other one has no emitter");
    let distance = value(&text, "fragprof_process_sample_interval_bytes", &label).unwrap();
    assert!((f64::from(16 << 10)..f64::from(64 << 10)).contains(&distance), "{distance}");
    let told = value(&text, "fragprof_process_sampled_live_bytes_est", &label).unwrap();
    let stderr = value(&text, "fragprof_process_sampled_live_bytes_stderr", &label).unwrap();
    assert!(stderr > 0.0 && (told - truth("site_small") - truth("site_large")).abs() < 5.0 * stderr + 2e6, "{told} ± {stderr}");

    // The governed tier leaves the process with an emitter alone, and watches the other one.
    let other = format!("pid=\"{}\"", plain.pid());
    wait_until("the governed tier has chosen", || {
        let text = daemon.metrics();
        value(&text, "fragprof_process_budget_ratio", &label).is_none() && value(&text, "fragprof_process_budget_ratio", &other).is_some()
    });
    drop(input);
}

#[test]
fn a_process_too_small_to_be_watched_is_listened_to_and_then_watched() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let program = compile(folder.path(), "ages.c", "ages_small", &["-O2"]);
    // One of the MiB that it allocates first stays live, and sixteen more follow on command.
    let mut process = Process::start_piped(sampled(&program, 32 << 10).args(["1", "16"]));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let config = listening(&["ages_small"], "").replace("rss_min_mib = 0", "rss_min_mib = 100000");
    let daemon = Daemon::start(&config);
    let label = format!("pid=\"{}\"", process.pid());
    daemon.metrics_with("fragprof_process_samples_total", &label);
    let mut input = process.input();
    input.write_all(b"g").unwrap();
    let line = process.out.wait_for(LIMIT, |line| line.starts_with("ledger")).unwrap();
    let words: Vec<&str> = line.split_whitespace().skip(1).collect();
    let truth = |site: &str| -> f64 { words.chunks(2).find(|pair| pair[0] == site).unwrap()[1].parse().unwrap() };
    let path = format!("/api/v1/processes/{}/profile?by=live&format=stacks", process.pid());
    wait_until("its growth is reported by stack", || {
        json(&daemon, &path)
            .is_some_and(|got| Estimates(got).of_function("inuse_bytes", "site_large").deviation(truth("site_large")).abs() < 4.0)
    });
    drop(input);
}

#[test]
fn an_image_without_an_emitter_is_detached_and_so_are_all_when_listening_is_switched_off() {
    if bpf().is_none() {
        return;
    }
    let folder = TempDir::new().unwrap();
    let names = ["ages_stays", "agesh", "steadfast"];
    let ages = compile(folder.path(), "ages.c", names[0], &["-O2"]);
    let steadfast = compile(folder.path(), "ages.c", "steadfast", &["-O2"]);
    let shell = folder.path().join("agesh");
    install(Path::new("/bin/sh"), &shell);
    // The second image of this process is started without the library.
    let script = format!("read line; exec env -u LD_PRELOAD {} 1", steadfast.display());
    let mut leaves = Process::start_piped(sampled(&shell, 4096).args(["-c", &script]));
    let mut stays = aged(&ages);
    let daemon = Daemon::start(&listening(&names, ""));
    let label = |process: &Process| format!("pid=\"{}\"", process.pid());
    daemon.metrics_with("fragprof_process_samples_total", &label(&stays));
    daemon.metrics_with("fragprof_process_samples_total", &label(&leaves));
    let mut input = leaves.input();
    input.write_all(b"\n").unwrap();
    leaves.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    wait_until("the image without an emitter is not listened to", || {
        let text = daemon.metrics();
        let watched = text.lines().any(|line| line.contains(&label(&leaves)) && line.contains("comm=\"steadfast\""));
        watched && value(&text, "fragprof_listener_targets", "") == Some(1.0)
    });
    assert!(leaves.is_running());
    daemon.configure(&listening(&names, "enabled = false"));
    daemon.process.signal(Signal::HUP);
    wait_until("no process is listened to", || value(&daemon.metrics(), "fragprof_listener_targets", "") == Some(0.0));
    assert_eq!(value(&daemon.metrics(), "fragprof_listener_enabled", ""), Some(0.0));
    // Samples received before are still counted.
    assert!(value(&daemon.metrics(), "fragprof_listener_samples_total", "").is_some());
    assert!(stays.is_running());
    drop(input);
}
