//! `fragprof report --json`, read by its documented keys, and the comparison with a program's own ledger.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::process::run;
use super::recording::fragprof;
use super::truth::Truth;

/// Totals, of a stack or of all.
#[derive(Debug, Clone, Copy, Default, Deserialize, PartialEq, Eq)]
pub struct Totals {
    /// Bytes requested of live blocks.
    pub inuse_bytes: u64,
    /// Live blocks.
    pub inuse_allocations: u64,
    /// Bytes requested of all blocks.
    pub allocated_bytes: u64,
    /// All blocks.
    pub allocations: u64,
    /// Live bytes of blocks whose free may have been lost.
    #[serde(default)]
    pub doubtful_bytes: Option<u64>,
}

/// One frame of a stack.
#[derive(Debug, Clone, Deserialize)]
pub struct Frame {
    /// Function's name, if known.
    pub function: Option<String>,
    /// Source file, if known.
    pub file: Option<String>,
    /// Line in it, from 1, if known.
    pub line: Option<u64>,
}

/// One stack, leaf first.
#[derive(Debug, Clone, Deserialize)]
pub struct Stack {
    /// Process, if there is more than one.
    #[serde(default)]
    pub pid: Option<u32>,
    /// Frames, leaf first.
    pub frames: Vec<Frame>,
    /// Why its outer frames are missing, if they are.
    #[serde(default)]
    pub truncated: Option<String>,
    /// Its allocations.
    #[serde(flatten)]
    pub totals: Totals,
}

/// Whether a function is a test program's site.
fn is_site(name: &str) -> bool {
    name.starts_with("site_") || name.starts_with("early_")
}

impl Stack {
    /// The functions' plain names, leaf first; `?` if not known.
    pub fn names(&self) -> Vec<&str> {
        self.frames.iter().map(|frame| frame.function.as_deref().map_or("?", plain_name)).collect()
    }
}

/// A whole report.
#[derive(Debug, Clone, Deserialize)]
pub struct Report {
    /// Length of the recording, in seconds.
    pub duration_s: f64,
    /// Of all stacks.
    pub totals: Totals,
    /// Losses, by kind.
    pub losses: Map<String, Value>,
    /// What the recording could not see.
    #[serde(default)]
    pub limits: Vec<String>,
    /// Every stack.
    pub stacks: Vec<Stack>,
}

/// Which part of a program's life was recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    /// All of it: blocks allocated before `ready` are in the report.
    Launch,
    /// From `ready` on: they are not in the report.
    Attach,
}

/// A function's name without parameters, template arguments and compiler suffixes.
fn plain_name(function: &str) -> &str {
    let end = function.find(['(', '<', '.', ' ', '[']).unwrap_or(function.len());
    &function[..end]
}

impl Report {
    /// Runs `fragprof report FILE --json`.
    pub fn read(file: &Path) -> Self {
        let done = run(fragprof().arg("report").arg(file).arg("--json"));
        assert!(done.status.success(), "fragprof report failed with {}:\n{}", done.status, done.err);
        serde_json::from_str(&done.out).unwrap_or_else(|e| panic!("the report does not have the documented form: {e}\n{}", done.out))
    }

    /// Sums of one process by the innermost frame that is a test program's site (`site_*`, `early_*`).
    pub fn by_site(&self, pid: u32) -> BTreeMap<String, Totals> {
        let mut sites: BTreeMap<String, Totals> = BTreeMap::new();
        for stack in self.stacks.iter().filter(|stack| stack.pid.is_none_or(|of| of == pid)) {
            let Some(site) = stack.names().into_iter().find(|name| is_site(name)) else { continue };
            let sum = sites.entry(site.to_owned()).or_default();
            sum.inuse_bytes += stack.totals.inuse_bytes;
            sum.inuse_allocations += stack.totals.inuse_allocations;
            sum.allocated_bytes += stack.totals.allocated_bytes;
            sum.allocations += stack.totals.allocations;
            if let Some(doubtful) = stack.totals.doubtful_bytes {
                *sum.doubtful_bytes.get_or_insert(0) += doubtful;
            }
        }
        sites
    }

    /// All non-zero losses, as `kind=count`.
    pub fn nonzero_losses(&self) -> Vec<String> {
        let counts = self.losses.iter().filter(|(_, value)| value.as_f64().is_some_and(|n| n != 0.0));
        counts.map(|(kind, value)| format!("{kind}={value}")).collect()
    }

    /// Differences from the program's own ledger, one per line; empty if there are none. `except` names sites whose numbers are not
    /// compared.
    pub fn differences(&self, truth: &Truth, since: Since, except: &[&str]) -> String {
        let mut seen = self.by_site(truth.pid);
        let mut text = String::new();
        for site in &truth.sites {
            let got = seen.remove(&site.site).unwrap_or_default();
            if except.contains(&site.site.as_str()) {
                continue;
            }
            let early = since == Since::Attach && site.site.starts_with("early_");
            let live = if early { (0, 0) } else { (site.live_bytes, site.live_count) };
            let made = if early { (0, 0) } else { (site.allocated_bytes, site.allocations) };
            let got_live = (got.inuse_bytes, got.inuse_allocations);
            let got_made = (got.allocated_bytes, got.allocations);
            if got_live != live || (!site.live_only && got_made != made) {
                writeln!(
                    text,
                    "{}: live (bytes, blocks) {live:?}, reported {got_live:?}; allocated {made:?}, reported {got_made:?}",
                    site.site
                )
                .expect("writing to a string works");
            }
        }
        for (site, got) in seen {
            if got.inuse_allocations != 0 && !except.contains(&site.as_str()) {
                writeln!(text, "{site}: nothing is live, reported {got:?}").expect("writing to a string works");
            }
        }
        text
    }

    /// Fails the test if the report differs from the program's own ledger.
    pub fn assert_equals(&self, truth: &Truth, since: Since) {
        self.assert_equals_except(truth, since, &[]);
    }

    /// As [`Report::assert_equals`], except for the named sites.
    pub fn assert_equals_except(&self, truth: &Truth, since: Since, except: &[&str]) {
        let differences = self.differences(truth, since, except);
        assert!(
            differences.is_empty(),
            "the report differs from the program's own ledger:\n{differences}losses: {:?}\n{}",
            self.losses,
            self.unattributed()
        );
    }

    /// Stacks without a site, for the message of a failure.
    fn unattributed(&self) -> String {
        let mut text = String::new();
        for stack in self.stacks.iter().filter(|stack| !stack.names().into_iter().any(is_site)).take(8) {
            let names: Vec<_> = stack.names().into_iter().take(8).collect();
            writeln!(text, "no site: {:?} in {names:?}", stack.totals).expect("writing to a string works");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn report(inuse: u64) -> Report {
        let json = serde_json::json!({
            "duration_s": 1.0, "mode": "exact", "losses": {"lost_allocations": 0},
            "totals": {"inuse_bytes": inuse, "inuse_allocations": 1, "allocated_bytes": 30, "allocations": 3},
            "stacks": [{
                "frames": [
                    {"function": "operator new(unsigned long)", "file": null, "line": null, "module": "libstdc++.so.6", "address": "0x1"},
                    {"function": "site_a(unsigned long)", "file": "a.cpp", "line": 3, "module": "a", "address": "0x2"},
                    {"function": "site_outer", "file": "a.cpp", "line": 9, "module": "a", "address": "0x3"},
                ],
                "inuse_bytes": inuse, "inuse_allocations": 1, "allocated_bytes": 30, "allocations": 3,
            }],
        });
        serde_json::from_value(json).unwrap()
    }

    fn truth() -> Truth {
        Truth::parse(
            r#"{"phase":"done","pid":7,"sites":[{"site":"site_a","live_bytes":10,"live_count":1,"allocated_bytes":30,"allocations":3,"live_only":false}]}"#,
        )
        .unwrap()
    }

    #[test]
    fn a_report_equal_to_the_ledger_has_no_differences() {
        assert_eq!(report(10).differences(&truth(), Since::Attach, &[]), "");
    }

    #[test]
    fn one_more_byte_is_a_difference() {
        assert!(report(11).differences(&truth(), Since::Attach, &[]).starts_with("site_a: live"));
    }

    #[test]
    fn a_site_that_is_only_in_the_report_must_hold_nothing() {
        let mut nothing = truth();
        nothing.sites.clear();
        assert!(report(10).differences(&nothing, Since::Attach, &[]).starts_with("site_a: nothing is live"));
    }
}
