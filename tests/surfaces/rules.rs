//! The recording and alert rules, checked with Prometheus's own tool.

use std::process::Command;

use crate::support::build::tool;
use crate::support::process::run;

#[test]
fn the_rules_pass_promtools_checks_and_their_cases() {
    let Some(promtool) = tool("promtool") else { return };
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus");
    for (what, file) in [("check", "fragprof.rules.yml"), ("test", "fragprof.rules.test.yml")] {
        let done = run(Command::new(&promtool).args([what, "rules", file]).current_dir(directory));
        assert!(done.status.success(), "{what}: {}\n{}", done.out, done.err);
    }
}

#[test]
fn every_metric_that_a_rule_uses_is_documented() {
    let rules = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/prometheus/fragprof.rules.yml")).unwrap();
    let documented = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/metrics.md")).unwrap();
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | ':');
    let asked = rules.split(|c: char| !is_name(c)).filter(|word| word.starts_with("fragprof_"));
    for name in asked {
        assert!(documented.contains(&format!("`{name}`")), "{name}");
    }
}
