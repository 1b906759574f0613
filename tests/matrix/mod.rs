//! The same questions for each C library, allocator and language: is an exact recording the program's own ledger, and does a census count
//! what lives? One ignored test; `make allocator-matrix` runs it and writes docs/allocators.md. It fetches packages of other Debian
//! suites, so it is no part of `make test`.

mod kernels;
mod places;

use std::process::Command;

use serde_json::Value;

use crate::support::bpf;
use crate::support::process::run;
use crate::support::recording::{Recording, fragprof};
use crate::support::rendezvous::Target;
use crate::support::report::Since;
use crate::support::truth::Truth;

/// What came out, as it stands in the table.
enum Outcome {
    /// As it should be.
    Good(String),
    /// Something that is known not to be offered.
    NotOffered(String),
    /// Not as it should be.
    Wrong(String),
}

/// A recording of all that `command` does between "ready" and its last rendezvous, against its ledger.
fn exact(command: &mut Command, phase: &str) -> Outcome {
    let mut target = Target::start(command);
    let recording = Recording::attach(&[target.pid()]);
    let truth = target.go_to(phase);
    let report = recording.stop();
    let differences = report.differences(&truth, Since::Attach, &[]);
    let blocks: u64 = truth.sites.iter().map(|site| site.allocations).sum();
    match (differences.is_empty(), report.nonzero_losses().is_empty()) {
        (true, true) => Outcome::Good(format!("{blocks} blocks, to the byte")),
        (true, false) => Outcome::Wrong(format!("losses: {:?}", report.nonzero_losses())),
        (false, _) => Outcome::Wrong(differences),
    }
}

/// A census of the process that keeps thousands of blocks, against its ledger: blocks alive, and their bytes with rounding.
fn census(command: &mut Command) -> Outcome {
    let mut target = Target::start(command);
    let truth: Truth = target.go_to("round");
    let (bytes, blocks) = truth.live();
    let done = run(fragprof().args(["census", &target.pid().to_string(), "--json"]));
    if !done.status.success() {
        return Outcome::NotOffered(done.err.lines().next().unwrap_or_default().to_owned());
    }
    let page: Value = serde_json::from_str(&done.out).unwrap();
    let heaps = page["heaps"].as_array().cloned().unwrap_or_default();
    let sum = |key: &str| heaps.iter().filter_map(|heap| heap[key].as_u64()).sum::<u64>();
    let unread: Vec<String> =
        heaps.iter().filter(|heap| heap["live_bytes"].is_null()).map(|heap| heap["allocator"].as_str().unwrap_or("?").to_owned()).collect();
    let (live_bytes, live_blocks) = (sum("live_bytes"), sum("live_allocations"));
    if live_bytes == 0 {
        return Outcome::NotOffered(if unread.is_empty() {
            "no reader".into()
        } else {
            format!("extent and residency only ({})", unread.join(", "))
        });
    }
    // Beside the ledger's blocks live the C library's own few. Where blocks in thread caches cannot be told from live ones (no
    // cached_bytes), they count as live.
    let caches_told = heaps.iter().all(|heap| !heap["cached_bytes"].is_null());
    let more = if caches_told { blocks / 50 } else { blocks / 5 };
    let with_caches = if caches_told { "" } else { ", thread caches among them" };
    let text = format!("{live_blocks} blocks of {blocks}, {:.3} of their bytes{with_caches}", live_bytes as f64 / bytes as f64);
    let bytes_fit = live_bytes >= bytes && live_bytes <= bytes + bytes / 4 + 32 * blocks + (64 << 10);
    let blocks_fit = live_blocks == 0 || (blocks..blocks + more + 64).contains(&live_blocks);
    if bytes_fit && blocks_fit { Outcome::Good(text) } else { Outcome::Wrong(text) }
}

fn print(place: &str, column: &str, outcome: &Outcome) -> bool {
    let (mark, text) = match outcome {
        Outcome::Good(text) => ("good", text),
        Outcome::NotOffered(text) => ("none", text),
        Outcome::Wrong(text) => ("wrong", text),
    };
    println!("@@cell\t{place}\t{column}\t{mark}\t{}", text.replace(['\n', '\t'], " "));
    mark != "wrong"
}

#[test]
#[ignore = "fetches packages of other suites: make allocator-matrix"]
fn every_place_is_recorded_and_counted() {
    if bpf().is_none() {
        return;
    }
    let mut all = true;
    for place in places::all() {
        all &= print(&place.name, "exact", &exact(&mut place.command("entry_points", &[]), "done"));
        all &= print(&place.name, "threads", &exact(&mut place.command("short_threads", &[]), "done"));
        all &= print(&place.name, "census", &census(&mut place.command("rounds", &[])));
    }
    for (name, mut command) in places::languages() {
        all &= print(&name, "exact", &exact(&mut command, "done"));
    }
    assert!(all, "see the cells marked wrong");
}
