//! `fragprof attach-sampler`: what is sampled in a process that runs, compared with its own ledger; every word it had, after detaching;
//! every refusal; what share of real programs' heaps has a stack; and that no process is harmed, whenever the command is killed.

mod attribution;
mod exact;
mod harmless;
mod refusals;
mod words;

use std::path::Path;

use serde_json::Value;

use crate::support::process::wait_until;
use crate::trim::made;

/// The arguments that attach it with a library of this test's own, to every byte.
pub(crate) fn attaching(pid: u32, library: &Path, sample_bytes: u64) -> Vec<String> {
    let library = library.to_str().unwrap();
    ["attach-sampler", &pid.to_string(), "--library", library, "--sample-bytes", &sample_bytes.to_string(), "--samples-per-second", "0"]
        .map(str::to_owned)
        .to_vec()
}

/// The arguments that detach it.
pub(crate) fn detaching(pid: u32) -> Vec<String> {
    ["attach-sampler", "--detach", &pid.to_string()].map(str::to_owned).to_vec()
}

/// Runs one of these, again for as long as the program has not begun to wait, or its thread is not given a processor; its report.
pub(crate) fn settled(arguments: &[String]) -> Value {
    let mut report = Value::Null;
    wait_until("a thread of the program waits", || {
        report = made(arguments);
        report["refused"] != "no_parked_thread" && report["refused"] != "not_stopped"
    });
    report
}

/// The same; nothing is refused.
#[track_caller]
pub(crate) fn done(arguments: &[String]) -> Value {
    let report = settled(arguments);
    assert!(report["refused"].is_null() && !report["calls"].as_array().unwrap().is_empty(), "{report}");
    report
}
