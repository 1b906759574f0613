//! The policy on a node with ten services over a long time: what it gave back, whether it was worth it, and what it cost them.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::daemon::{Daemon, value, watching};
use crate::support::LIMIT;
use crate::support::build::standalone;
use crate::support::process::Process;
use crate::support::serial;

/// Longest stall that is allowed, and so the limit for the services' p99.
const STALL_MAX_MS: u64 = 100;

struct Service {
    process: Process,
    /// Needs its memory again at once: a call in it is in vain.
    is_restless: bool,
    /// Resident bytes by second of the test.
    resident: Vec<u64>,
}

fn resident_bytes(pid: u32) -> u64 {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// Eight services whose peaks are far apart, and two whose peaks follow each other.
fn services(period_s: u64) -> Vec<Service> {
    let program = standalone(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/agent/service.c"), &[]);
    let start = |index: u64| {
        let is_restless = index >= 8;
        let (between, peak) = if is_restless { (2, 2) } else { (period_s + index, 3) };
        let mut command = Command::new(&program);
        command.args([between.to_string(), peak.to_string(), (24 + index * 8).to_string()]);
        let process = Process::start_piped(&mut command);
        process.out.wait_for(LIMIT, |line| line == "ready").unwrap_or_else(|| panic!("not ready: {}", process.err));
        Service { process, is_restless, resident: Vec::new() }
    };
    (0..10).map(start).collect()
}

#[test]
#[ignore = "takes an hour: make reclaim-node"]
fn ten_services_give_memory_back_and_none_of_them_is_slower_than_the_limit() {
    let _alone = serial();
    let seconds: u64 = std::env::var("FRAGPROF_RECLAIM_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(3600);
    let period_s = (seconds / 6).clamp(40, 600);
    let quiet_s = period_s / 4;
    let mut services = services(period_s);
    let config = format!(
        "[reclaim]\nenabled = true\nquiet_s = {quiet_s}\ninterval_s = {}\ncalls_per_hour_max = 3600\ntrimmable_min_mib = 8\ntrimmable_min_percent = \
         20.0\nmax_stall_ms = {STALL_MAX_MS}\n[[reclaim.rules]]\ncommand = \"service\"",
        period_s / 2
    );
    let daemon = Daemon::start(&watching(&["service"], &config));
    let begun = Instant::now();
    // By second: everyone's resident memory, and the calls that were seen by then.
    let mut calls: BTreeMap<u64, (u64, Value)> = BTreeMap::new();
    while begun.elapsed() < Duration::from_secs(seconds) {
        std::thread::sleep(Duration::from_secs(1));
        for service in &mut services {
            service.resident.push(resident_bytes(service.process.pid()));
        }
        // A request that failed is no loss: each asks for the last minute.
        let answer = daemon.try_ask("GET /api/v1/events?limit=500&from=-60 HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        let events: Value = answer.ok().and_then(|answer| serde_json::from_str(&answer.body).ok()).unwrap_or_default();
        let second = services.first().map_or(0, |service| service.resident.len() as u64);
        for event in events["events"].as_array().into_iter().flatten().filter(|event| event["kind"] == "trim") {
            calls.entry(event["id"].as_u64().unwrap()).or_insert_with(|| (second, event.clone()));
        }
    }
    let text = daemon.metrics();
    drop(daemon);
    println!(
        "| service | peaks | calls | given back | of predicted | in vain | p50 | p99 | longest request |\n|---|---|---|---|---|---|---|---|---|"
    );
    let (mut all_bytes, mut vain, mut slowest, mut in_restless) = (0, 0, 0.0f64, 0);
    for (number, mut service) in services.into_iter().enumerate() {
        let pid = u64::from(service.process.pid());
        let own: Vec<&(u64, Value)> = calls.values().filter(|(_, event)| event["process"]["pid"].as_u64() == Some(pid)).collect();
        let bytes = |key: &str| own.iter().filter_map(|(_, event)| event["trim"][key].as_u64()).sum::<u64>();
        let (given, predicted) = (bytes("given_back_bytes"), bytes("predicted_bytes"));
        // In vain: half of it was needed again within the quiet time.
        let needed = |second: u64, given: u64| {
            let after = service.resident.iter().skip(second as usize).take(quiet_s as usize);
            let (low, high) = after.fold((u64::MAX, 0), |(low, high), &bytes| (low.min(bytes), high.max(bytes)));
            high.saturating_sub(low) > given / 2
        };
        let is_vain = |call: &&&(u64, Value)| needed(call.0, call.1["trim"]["given_back_bytes"].as_u64().unwrap_or(0));
        let own_vain = own.iter().filter(is_vain).count();
        let mib = |second: u64| service.resident.get(second as usize).map_or(0, |bytes| bytes >> 20);
        for (second, event) in &own {
            // Every ten seconds around it.
            let around: Vec<u64> = (0..40).map(|i| mib((second + 10 * i).saturating_sub(200))).collect();
            eprintln!("service {number}, second {second}: gave back {}, resident MiB {around:?}", event["trim"]["given_back_bytes"]);
        }
        drop(service.process.input());
        assert!(service.process.wait(LIMIT).success());
        let counts: Value = serde_json::from_str(service.process.out.all().lines().last().unwrap()).unwrap();
        let ms = |key: &str| counts[key].as_f64().unwrap() * 1e3;
        println!(
            "| {number}{} | {} | {} | {:.0} MiB | {:.1} % | {own_vain} | {:.3} ms | {:.3} ms | {:.1} ms |",
            if service.is_restless { " (restless)" } else { "" },
            counts["peaks"],
            own.len(),
            given as f64 / f64::from(1 << 20),
            given as f64 * 100.0 / predicted.max(1) as f64,
            ms("p50_s"),
            ms("p99_s"),
            ms("longest_s")
        );
        in_restless += if service.is_restless { own.len() } else { 0 };
        (all_bytes, vain, slowest) = (all_bytes + given, vain + own_vain, slowest.max(ms("p99_s")));
    }
    let disappointments = value(&text, "fragprof_reclaim_disappointments_total", "").unwrap_or(0.0);
    println!(
        "{seconds} s: {} calls gave back {:.0} MiB; {disappointments} disappointed",
        calls.len(),
        all_bytes as f64 / f64::from(1 << 20)
    );
    assert!(all_bytes > 64 << 20, "{all_bytes}");
    assert_eq!((vain, in_restless), (0, 0), "calls in vain");
    assert!(slowest <= STALL_MAX_MS as f64, "{slowest} ms");
}
