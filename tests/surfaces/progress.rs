//! The progress line during long operations.

use std::process::Command;

use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::run;
use crate::top::terminal::Terminal;

fn slow_census(pid: u32) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    // About 20 MiB with a pause after each.
    command.args(["census", &pid.to_string(), "--pause", "100"]);
    command
}

#[test]
fn a_terminal_shows_the_progress_of_a_long_census_and_then_only_its_result() {
    let target = fragmented(&fragments("surfaces-slow"), &["16"]);
    let mut terminal = Terminal::start(&mut slow_census(target.pid()), 100, 60);
    terminal.wait_for("the progress", |screen| screen.has("fragprof: reading the heap: "));
    assert!(terminal.wait().success());
    let screen = terminal.wait_for("the result", |screen| screen.has("pinned"));
    assert!(!screen.has("reading the heap"), "{}", screen.lines.join("\n"));
}

#[test]
fn a_pipe_gets_no_progress_line() {
    let target = fragmented(&fragments("surfaces-piped"), &["16"]);
    let done = run(&mut slow_census(target.pid()));
    assert!(done.status.success());
    assert_eq!(done.err, "");
    assert!(!done.out.contains('\u{1b}'), "{}", done.out);
}
