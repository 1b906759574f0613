//! Real programs to which the sampler was attached while they ran: what they allocated since, against a recording of every call in the same
//! run; and the share of their live heaps that has a stack, in each way to get one. The second is a measurement:
//!
//! ```text
//! make bench-attribution
//! ```

use std::time::{Duration, Instant};

use super::{attaching, detaching, done};
use crate::emitter::report::Estimates;
use crate::emitter::strata::{SAMPLE_BYTES, Service};
use crate::sampler::programs::Libraries;
use crate::support::recording::{Recording, fragprof};
use crate::trim::programs::number;
use fragprof::sampler::library::Flavour;

const PROGRAMS: [&str; 4] = ["redis", "python", "java", "postgres"];

fn record(pid: u32, mode: &str) -> Recording {
    Recording::attach_by(fragprof(), &[pid], &["--mode", mode])
}

/// Both begin at the same moment, while the program is idle.
#[test]
fn what_real_programs_allocate_after_attaching_is_estimated_as_every_call_is_counted() {
    for name in PROGRAMS {
        let libraries = Libraries::new();
        let Some(mut service) = Service::start(name, false) else { continue };
        let pid = service.process.pid();
        service.work();
        done(&attaching(pid, &libraries.path(Flavour::Attached), SAMPLE_BYTES));
        let (every_call, sampled) = (record(pid, "exact"), record(pid, "sampled"));
        for _ in 0..3 {
            service.work();
        }
        let (sampled, every_call) = (Estimates::of(sampled), Estimates::of(every_call));
        let told = sampled.of_process("inuse_bytes", pid);
        let stacks = every_call.0["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == pid);
        let is_rest = |name: &str| ["[before attach]", "[unattributed]"].contains(&name);
        let counted: f64 = stacks
            .filter(|stack| !stack["frames"][0]["function"].as_str().is_some_and(is_rest))
            .map(|stack| stack["inuse_bytes"].as_f64().unwrap_or(0.0))
            .sum();
        println!("{name}: {:.2} ± {:.2} MB told, {:.2} counted", told.est / 1e6, told.stderr / 1e6, counted / 1e6);
        assert!(counted > 500_000.0, "{name}: {counted}");
        // Four standard errors, and what the two recordings do not begin and end at together.
        assert!((told.est - counted).abs() < 4.0 * told.stderr + 0.02 * counted, "{name}: {told:?}, {counted}");
        done(&detaching(pid));
        service.work();
    }
}

/// Share of the live heap, by the census at the end, that has a stack, in percent; and the samples per second's cost is in `bench-sampler`.
fn share(name: &str, way: &str, libraries: &Libraries, time: Duration) -> Option<f64> {
    let mut service = Service::start(name, way == "preloaded")?;
    let pid = service.process.pid();
    // A heap from before.
    for _ in 0..3 {
        service.work();
    }
    if way == "attached" {
        done(&attaching(pid, &libraries.path(Flavour::Attached), SAMPLE_BYTES));
    }
    let recording = record(pid, if way == "windows" { "governed" } else { "sampled" });
    let begun = Instant::now();
    while begun.elapsed() < time {
        service.work();
        // A service that is not always busy; some of them keep a part of each unit for ever.
        std::thread::sleep(Duration::from_millis(500));
    }
    let report = Estimates::of(recording);
    let known = report.of_process("inuse_bytes", pid).est;
    let live = report.0["processes"].as_array().unwrap().iter().find(|process| process["pid"] == pid)?["live_bytes"].as_f64()?;
    Some(known * 100.0 / live)
}

#[test]
#[ignore = "a measurement: make bench-attribution"]
fn share_of_the_live_heap_that_has_a_stack() {
    let libraries = Libraries::new();
    let time = Duration::from_secs(u64::from(number("FRAGPROF_ATTRIBUTION_SECONDS", 300)));
    println!("share of the live heap with a stack, {} s after the start of watching\n", time.as_secs());
    println!("| program | windows, 1 % | attached | preloaded |\n|---|---|---|---|");
    for name in PROGRAMS {
        let shares = ["windows", "attached", "preloaded"].map(|way| share(name, way, &libraries, time));
        let text = shares.map(|share| share.map_or_else(|| "–".to_owned(), |share| format!("{share:.0} %")));
        println!("| {name} | {} |", text.join(" | "));
    }
}
