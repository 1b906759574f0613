//! Tests that make targets, scripts and the plans of guests name: a renamed one would leave them running nothing.

use std::path::Path;
use std::process::Command;

use crate::support::process::run;

/// The names after `--test integration` or the test binary, up to the options.
fn named(text: &str) -> Vec<&str> {
    let callers = ["--test integration ", "\"$INTEGRATION\" ", "\"$integration\" "];
    let after = callers.into_iter().flat_map(|caller| text.split(caller).skip(1));
    let words = after.flat_map(|rest| rest.lines().next().unwrap_or_default().split_whitespace().take_while(|word| !word.starts_with('-')));
    words.filter(|word| word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_:".contains(&byte))).collect()
}

#[test]
fn every_test_that_a_make_target_a_script_or_a_plan_names_exists() {
    let listed = run(Command::new(std::env::current_exe().unwrap()).arg("--list")).out;
    let tests: Vec<&str> = listed.lines().filter_map(|line| line.strip_suffix(": test")).collect();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &Path| std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut texts = vec![read(&root.join("Makefile"))];
    for entry in std::fs::read_dir(root.join("scripts")).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.extension().is_some_and(|extension| extension == "sh") {
            texts.push(read(&entry));
        }
    }
    let filters: Vec<&str> = texts.iter().flat_map(|text| named(text)).collect();
    assert!(filters.len() > 30, "{filters:?}");
    let unknown: Vec<_> = filters.iter().filter(|filter| !tests.iter().any(|test| test.contains(**filter))).collect();
    assert!(unknown.is_empty(), "no test has these names: {unknown:?}");
    for plan in ["plan", "plan-arm64"] {
        let plan = read(&root.join("scripts/matrix").join(plan));
        // A name, and for some the oldest kernel on which it is run.
        let names = plan.lines().filter_map(|line| line.split_whitespace().next()).filter(|name| name.contains("::"));
        let unknown: Vec<_> = names.filter(|name| !tests.contains(name)).collect();
        assert!(unknown.is_empty(), "no test has these names: {unknown:?}");
    }
}
