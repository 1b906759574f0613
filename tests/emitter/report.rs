//! A report of estimates, by its documented keys.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use crate::support::process::run;
use crate::support::recording::{Recording, fragprof};
use rustix::process::Signal;

/// `fragprof report --json` of a recording.
pub struct Estimates(pub Value);

/// An estimate with its standard error.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Figure {
    /// The estimate.
    pub est: f64,
    /// Its standard error.
    pub stderr: f64,
}

impl Figure {
    /// The distance of the truth in standard errors.
    pub fn deviation(&self, truth: f64) -> f64 {
        (self.est - truth) / self.stderr.max(1.0)
    }
}

impl Estimates {
    /// Reads a profile.
    pub fn read(file: &Path) -> Self {
        let done = run(fragprof().arg("report").arg(file).arg("--json"));
        assert!(done.status.success(), "{}", done.err);
        Self(serde_json::from_str(&done.out).unwrap())
    }

    /// Ctrl-C, and the recording's report.
    pub fn of(mut recording: Recording) -> Self {
        recording.process.signal(Signal::INT);
        let status = recording.wait(crate::support::LIMIT);
        assert!(status.success(), "{}", recording.process.err.all());
        Self::read(&recording.file())
    }

    /// A figure of all stacks.
    pub fn total(&self, key: &str) -> Figure {
        figure(&self.0["totals"], key)
    }

    /// A figure by the innermost function that the test accepts.
    pub fn by_function(&self, key: &str, accept: impl Fn(&str) -> bool) -> BTreeMap<String, Figure> {
        let mut sums: BTreeMap<String, Figure> = BTreeMap::new();
        for stack in self.0["stacks"].as_array().unwrap() {
            let names = stack["frames"].as_array().unwrap().iter().filter_map(|frame| frame["function"].as_str());
            let Some(name) = names.into_iter().find(|name| accept(name)) else { continue };
            let sum = sums.entry(name.to_owned()).or_default();
            let more = figure(stack, key);
            *sum = Figure { est: sum.est + more.est, stderr: sum.stderr.hypot(more.stderr) };
        }
        sums
    }

    /// A figure of one function.
    pub fn of_function(&self, key: &str, function: &str) -> Figure {
        self.by_function(key, |name| name == function).remove(function).unwrap_or_default()
    }

    /// A figure of all named stacks of a process: without `[unattributed]` and its like.
    pub fn of_process(&self, key: &str, pid: u32) -> Figure {
        let stacks = self.0["stacks"].as_array().unwrap().iter().filter(|stack| stack["pid"] == pid);
        // A function without a symbol has a name in brackets too.
        let is_rest =
            |stack: &&Value| stack["frames"][0]["function"].as_str().is_some_and(|n| ["[before attach]", "[unattributed]"].contains(&n));
        let named = stacks.filter(|stack| !is_rest(stack));
        named
            .map(|stack| figure(stack, key))
            .fold(Figure::default(), |sum, one| Figure { est: sum.est + one.est, stderr: sum.stderr.hypot(one.stderr) })
    }

    /// Notes, limits and doubts together.
    pub fn said(&self) -> String {
        ["notes", "limits", "doubts"].map(|key| self.0[key].to_string()).join("\n")
    }
}

fn figure(of: &Value, key: &str) -> Figure {
    let number = |key: String| of[&key].as_f64();
    Figure { est: number(format!("{key}_est")).unwrap_or(0.0), stderr: number(format!("{key}_stderr")).unwrap_or(0.0) }
}
