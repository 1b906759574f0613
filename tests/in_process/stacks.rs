//! The stacks are those that a recording by probes takes.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

use super::{record, report};
use crate::support::build::{Link, program};
use crate::support::process::run;
use crate::support::recording::fragprof;
use crate::support::{bpf, serial};

/// Allocations by stack: the functions, the innermost first; only of stacks with the function, if one is named.
fn by_stack(report: &Value, within: Option<&str>) -> BTreeMap<Vec<String>, u64> {
    let mut stacks: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for stack in report["stacks"].as_array().unwrap() {
        let frames = stack["frames"].as_array().unwrap();
        let name = |frame: &Value| frame["function"].as_str().unwrap_or("?").to_owned();
        let names: Vec<_> = frames.iter().map(name).collect();
        if within.is_none_or(|within| names.iter().any(|name| name == within)) {
            *stacks.entry(names).or_default() += stack["allocations"].as_u64().unwrap();
        }
    }
    stacks
}

fn recorded(mut command: Command, target: &[&str], out: &Path) -> Value {
    command.arg("-o").arg(out).arg("--").args(target);
    let done = run(command.env("PERL_HASH_SEED", "0").env("PERL_PERTURB_KEYS", "0"));
    assert!(done.status.success(), "{}\n{}", done.out, done.err);
    report(out)
}

/// Records a deterministic command both ways. `within`: the function whose allocations are compared. `near`: the share of them whose stacks may
/// differ.
fn compare(target: &[&str], within: Option<&str>, near: f64) {
    let directory = TempDir::new().unwrap();
    let mut by_probes = fragprof();
    by_probes.args(["record", "--mode", "exact"]);
    let probes = recorded(by_probes, target, &directory.path().join("probes"));
    let inside = recorded(record(), target, &directory.path().join("inside"));
    let (probes, inside) = (by_stack(&probes, within), by_stack(&inside, within));
    let all: u64 = probes.values().sum();
    assert!(all > 400, "{target:?}: {all} allocations");
    let differing: u64 = probes.iter().map(|(stack, count)| count.abs_diff(inside.get(stack).copied().unwrap_or(0))).sum();
    let examples: Vec<_> = probes.iter().filter(|(stack, count)| inside.get(*stack) != Some(count)).take(3).collect();
    let others: Vec<_> = inside.iter().filter(|(stack, count)| probes.get(*stack) != Some(count)).take(3).collect();
    assert!(
        differing as f64 <= near * all as f64,
        "{target:?}: {differing} of {all} allocations have other stacks; by probes {examples:#?}, from inside {others:#?}"
    );
    println!("{target:?}: {all} allocations in {} stacks, {differing} differ: {examples:#?}, from inside {others:#?}", probes.len());
}

#[test]
fn the_stacks_of_real_programs_are_those_of_a_recording_by_probes() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    // perl's start copies the environment, in which one of them has a variable more.
    compare(
        &["perl", "-e", "my %h; $h{$_} = [1 .. 20] for 1 .. 2000; sub f { my $n = shift; $n ? f($n - 1) : [1 .. 9] } f(20) for 1 .. 50"],
        Some("perl_run"),
        0.001,
    );
    compare(&["sqlite3", ":memory:", "create table t(a); insert into t values (1), (2); select a from t order by a desc;"], None, 0.001);
}

#[test]
fn the_stacks_of_a_signal_handler_are_complete() {
    for name in ["signal_stacks", "deep_recursion"] {
        let directory = TempDir::new().unwrap();
        let path = program(name, Link::Dynamic);
        let report = recorded(record(), &[path.to_str().unwrap()], &directory.path().join("out"));
        let ends = report["stacks_complete_ratio"].as_f64();
        println!("{name}: {ends:?}");
        assert!(name == "deep_recursion" || ends == Some(1.0), "{name}: {ends:?}, {}", report["stack_ends"]);
    }
}
