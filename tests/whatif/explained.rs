//! `explain` of a trace: settings among the remedies have the effect that a replay shows, and without a trace an upper bound.

use serde_json::Value;

use super::truth::Measured;
use super::{Recorded, fragprof};
use crate::support::bpf;

#[test]
fn a_trace_shows_what_fewer_arenas_really_save() {
    if bpf().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    // Threads whose arenas all keep what they freed.
    let recorded = Recorded::own("arenas", "whatif_arenas");
    let trace = recorded.record(&directory);
    let done = fragprof().arg("explain").arg(&trace).arg("--json").output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let verdict: Value = serde_json::from_slice(&done.stdout).unwrap();
    println!("{}: {}", verdict["verdict"], verdict["remedies"]);
    let remedies = verdict["remedies"].as_array().unwrap();
    let arenas = remedies.iter().find(|one| one["setting"] == "glibc:arena_max=2").unwrap_or_else(|| panic!("{verdict}"));
    assert_eq!(arenas["at_most"], false, "{arenas}");
    assert!(arenas["basis"].as_str().unwrap().starts_with("replayed: "), "{arenas}");
    let limited = [("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")];
    let end = |environment: &[(&str, &str)]| Measured::of(recorded.command().envs(environment.iter().copied())).end_bytes as f64;
    let (now, then) = (end(&[]), end(&limited));
    let predicted = arenas["predicted_bytes"].as_f64().unwrap();
    println!("predicted {predicted}, saved {}", now - then);
    assert!((predicted - (now - then)).abs() < 0.15 * now, "predicted {predicted}, {now} against {then}");
}
