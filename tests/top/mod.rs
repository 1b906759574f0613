//! `fragprof top` as seen by a user: on a pseudo terminal, in a pipe, and when the process, the agent or the terminal ends.

pub mod terminal;

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use rustix::process::Signal;
use serde_json::Value;
use terminal::{Screen, Terminal};

use crate::support::process::{Process, run};
use crate::support::{LIMIT, bpf};

/// Live bytes of `steady_site` in `steady.c`.
const STEADY_BYTES: u64 = 100 * 1000;
/// Set for a test that is run by another test.
const ON_A_TERMINAL: &str = "FRAGPROF_TEST_ON_A_TERMINAL";

fn steady_program() -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT
        .get_or_init(|| {
            let out = crate::support::build::output_dir().join(format!("top-steady-{}", std::process::id()));
            let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/top/steady.c");
            let done = run(Command::new("cc").args(["-O1", "-g", "-Wall", "-Werror", source, "-o"]).arg(&out));
            assert!(done.status.success(), "{}", done.err);
            out
        })
        .clone()
}

/// The same with a large heap: the list omits small processes.
fn large() -> Process {
    let program = crate::support::build::output_dir().join("top-large");
    crate::support::build::install(&steady_program(), &program);
    let process = Process::start_piped(Command::new(program).arg("40"));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    process
}

fn steady() -> Process {
    let process = Process::start_piped(&mut Command::new(steady_program()));
    process.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    process
}

fn top() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    command.arg("top");
    command
}

fn watching(pid: u32) -> Terminal {
    Terminal::start(top().args(["-i", "200ms", "-p", &pid.to_string()]), 120, 30)
}

fn has_settled(screen: &Screen) -> bool {
    screen.field("live").is_some_and(|text| text.contains("in 100 blocks")) && !screen.has("not known yet") && screen.has("steady_site")
}

/// Parses a displayed number of bytes.
fn bytes(text: &str) -> f64 {
    let mut words = text.split_whitespace();
    let number: f64 = words.next().unwrap().replace(',', "").parse().unwrap();
    let unit = words.next().unwrap().trim_end_matches([',', ';']).trim_end_matches("/s");
    let units = ["B", "KiB", "MiB", "GiB"];
    number * 1024f64.powi(i32::try_from(units.iter().position(|u| *u == unit).unwrap()).unwrap())
}

/// Asserts that two numbers differ by at most a fraction of the first.
#[track_caller]
fn assert_near(what: &str, a: f64, b: f64, share: f64) {
    assert!((a - b).abs() <= a.abs() * share + 1.0, "{what}: {a} and {b}");
}

fn once(pid: u32) -> Value {
    let done = run(top().args(["--once", "--json", "-p", &pid.to_string()]));
    assert!(done.status.success(), "{}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

#[test]
fn the_screen_agrees_with_the_json_and_with_the_program() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let terminal = watching(target.pid());
    let screen = terminal.wait_for("a settled picture", has_settled);
    let sample = once(target.pid());
    let process = &sample["processes"][0];

    // The program replaces its blocks one at a time: between a free and the next allocation it holds one fewer.
    let blocks = process["inuse_allocations"].as_u64().unwrap();
    assert!((99..=100).contains(&blocks), "{blocks}");
    assert_eq!(process["inuse_bytes"].as_u64(), Some(STEADY_BYTES / 100 * blocks));
    let live = screen.field("live").unwrap();
    assert_near("live bytes", STEADY_BYTES as f64, bytes(live), 0.011);

    let heap = screen.field("heap").unwrap();
    let behind = |word: &str| bytes(heap.split(word).nth(1).unwrap());
    // The 8 MiB allocated before the attach are in the heap.
    let extent = process["extent_bytes"].as_f64().unwrap();
    assert!(extent >= f64::from(8 << 20) + STEADY_BYTES as f64, "{extent}");
    assert_near("extent", extent, behind("extent "), 0.005);
    assert_near("resident", process["resident_bytes"].as_f64().unwrap(), behind("resident "), 0.005);
    assert_near("live by the census", process["live_bytes"].as_f64().unwrap(), behind("live "), 0.005);
    assert!(process["unattributed_bytes"].as_u64().unwrap() >= 8 << 20);

    let rate = screen.field("rate").unwrap();
    let per_second: f64 = rate.split_whitespace().next().unwrap().replace(',', "").parse().unwrap();
    assert!((100.0..20_000.0).contains(&per_second), "{rate}");
    assert_near("bytes per second", per_second * 1000.0, bytes(rate.split(", ").nth(1).unwrap()), 0.01);
    assert_near("rate", process["allocations_per_s"].as_f64().unwrap(), per_second, 0.5);

    let stack = &process["stacks"][0];
    assert_eq!(stack["inuse_bytes"].as_u64(), Some(STEADY_BYTES / 100 * blocks));
    assert!(stack["frames"].as_array().unwrap().iter().any(|frame| frame["function"] == "steady_site"));
    let row = screen.lines.iter().find(|line| line.contains("steady_site")).unwrap();
    assert_near("live bytes of the stack", STEADY_BYTES as f64, bytes(row), 0.011);
}

#[test]
fn every_kind_of_exit_restores_the_terminal() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let keys = [("q", "q"), ("Ctrl-C", "\u{3}"), ("Esc", "\u{1b}")].map(|(way, key)| (way, Ok(key)));
    let signals = [("SIGTERM", Signal::TERM), ("SIGINT", Signal::INT)].map(|(way, signal)| (way, Err(signal)));
    for (way, leave) in keys.into_iter().chain(signals) {
        let mut terminal = watching(target.pid());
        let screen = terminal.wait_for("a picture", |screen| screen.has("live"));
        assert!(screen.alternate && screen.cursor_hidden, "{way}");
        match leave {
            Ok(key) => terminal.press(key),
            Err(signal) => terminal.signal(signal),
        }
        assert!(terminal.wait().success(), "{way}");
        terminal.assert_restored();
    }
}

#[test]
fn the_last_picture_of_a_killed_process_stays_until_a_key_is_pressed() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let mut terminal = watching(target.pid());
    terminal.wait_for("a settled picture", has_settled);
    target.signal(Signal::KILL);
    let screen = terminal.wait_for("the end", |screen| screen.has("Press any key"));
    assert!(screen.has("killed by signal 9"), "{}", screen.lines.join("\n"));
    assert!(screen.has("steady_site") && screen.alternate);
    terminal.press("x");
    assert!(terminal.wait().success());
    terminal.assert_restored();
}

#[test]
fn keys_show_help_a_full_stack_and_the_filtered_stacks() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let mut terminal = watching(target.pid());
    terminal.wait_for("a settled picture", has_settled);
    terminal.press("?");
    terminal.wait_for("help", |screen| screen.has("any key closes"));
    terminal.press(" \r");
    terminal.wait_for("the stack in full", |screen| screen.has("malloc") && screen.has("main") && screen.has("steady.c:"));
    terminal.press("\r/no such function");
    terminal.wait_for("no stack", |screen| screen.has("no stack has a frame"));
    terminal.press("\u{1b}");
    terminal.wait_for("all stacks", |screen| screen.has("steady_site") && !screen.has("no stack has"));
}

#[test]
fn resizing_the_terminal_redraws_the_picture() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let terminal = watching(target.pid());
    let screen = terminal.wait_for("a settled picture", has_settled);
    assert!(screen.lines[29].contains("q quit"));
    terminal.resize(100, 20);
    terminal.wait_for("the footer in the new last line", |screen| screen.lines[19].contains("q quit"));
}

#[test]
fn no_color_is_respected() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    for (value, coloured) in [("", true), ("1", false)] {
        let mut command = top();
        command.args(["-i", "200ms", "-p", &target.pid().to_string()]);
        let mut shell = Command::new("env");
        shell.arg(format!("NO_COLOR={value}")).arg(command.get_program()).args(command.get_args());
        let terminal = Terminal::start(&mut shell, 120, 30);
        let screen = terminal.wait_for("a settled picture", has_settled);
        assert_eq!(screen.coloured, coloured, "NO_COLOR={value}");
    }
}

#[test]
fn in_a_pipe_samples_are_text_until_the_process_ends() {
    let Some(_bpf) = bpf() else { return };
    let mut target = steady();
    let mut watcher = Process::start(top().args(["-i", "200ms", "-p", &target.pid().to_string()]));
    assert!(watcher.out.wait_for(LIMIT, |line| line.contains("steady_site")).is_some(), "{}", watcher.err);
    drop(target.input());
    assert!(watcher.wait(LIMIT).success());
    let text = watcher.out.all();
    assert!(text.contains("exited with status 0"), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
}

#[test]
fn json_samples_are_one_per_line() {
    let Some(_bpf) = bpf() else { return };
    let target = steady();
    let watcher = Process::start(top().args(["--json", "-i", "200ms", "-p", &target.pid().to_string()]));
    let is_settled = |line: &str| {
        let sample: Value = serde_json::from_str(line).unwrap();
        sample["processes"][0]["inuse_bytes"] == STEADY_BYTES
    };
    assert!(watcher.out.wait_for(LIMIT, is_settled).is_some(), "{}", watcher.err);
}

#[test]
fn a_missing_process_is_an_error_and_the_terminal_is_not_touched() {
    let Some(_bpf) = bpf() else { return };
    // pid_max is at most 2^22.
    let mut terminal = Terminal::start(top().args(["-p", "8388608"]), 80, 24);
    assert_eq!(terminal.wait().code(), Some(3));
    let screen = terminal.wait_for("the message", |screen| screen.has("no process with pid 8388608"));
    assert!(!screen.alternate);
    assert!(!terminal.written().contains("1049"));
}

#[test]
fn without_an_agent_all_processes_are_shown_with_their_ladders_and_one_of_them_is_recorded() {
    let Some(_bpf) = bpf() else { return };
    let target = large();
    let watcher = Process::start(top().args(["--json", "-i", "200ms"]));
    let is_known = |line: &str| {
        let view: Value = serde_json::from_str(line).unwrap();
        let one = view["processes"].as_array().unwrap().iter().find(|one| one["pid"] == target.pid()).cloned();
        one.is_some_and(|one| one["ladder"]["live_bytes"].as_u64() > Some(30 << 20))
    };
    assert!(watcher.out.wait_for(LIMIT, is_known).is_some(), "{}", watcher.err);
    drop(watcher);

    let mut terminal = Terminal::start(&mut top(), 120, 30);
    terminal.wait_for("the list", |screen| screen.has("this machine"));
    terminal.press("/top-large\r");
    terminal.wait_for("the program's row", |screen| screen.lines[2].contains("top-large") && screen.lines[3].is_empty());
    terminal.press("\r");
    terminal.wait_for("its address space", |screen| screen.has("space    ") && screen.has("verdict") && screen.has("███"));
    terminal.press("e");
    terminal.wait_for("the recording", |screen| screen.has("steady_site"));
    terminal.press("q");
    assert!(terminal.wait().success());
    terminal.assert_restored();
}

#[test]
fn a_panic_restores_the_terminal_before_its_message() {
    let name = "top::panics_on_a_terminal";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--ignored", "--nocapture"]).env(ON_A_TERMINAL, "1");
    let mut terminal = Terminal::start(&mut command, 80, 24);
    assert!(!terminal.wait().success());
    terminal.assert_restored();
    let written = terminal.written();
    let (taken, left) = (written.find("\u{1b}[?1049h").unwrap(), written.find("\u{1b}[?1049l").unwrap());
    let message = written.find("a view failed").unwrap();
    assert!(taken < left && left < message, "{written:?}");
}

#[test]
#[ignore = "run by a_panic_restores_the_terminal_before_its_message"]
fn panics_on_a_terminal() {
    if std::env::var_os(ON_A_TERMINAL).is_none() {
        return;
    }
    let mut screen = fragprof::tui::screen::Screen::take().unwrap();
    screen.draw(|_| panic!("a view failed")).unwrap();
}

/// The exit status of a view that was ended by its guard.
const GUARDED: i32 = 129;

#[test]
fn the_view_ends_with_its_terminal_with_and_without_a_signal() {
    let target = steady();
    let pid = target.pid().to_string();
    let one = ["-p", pid.as_str()];
    let all_and_one: [&[&str]; 2] = [&[], &one];
    let mut by_itself = 0;
    for args in all_and_one.into_iter().take(1 + usize::from(bpf().is_some())) {
        for start in [Terminal::start, Terminal::start_unsignalled] {
            for keys in ["", "\u{1b}["] {
                let mut terminal = start(top().args(["-i", "200ms"]).args(args), 120, 30);
                terminal
                    .wait_for("a picture", |screen| screen.alternate && screen.lines.iter().filter(|line| !line.is_empty()).count() > 2);
                // The beginning of an incomplete key sequence: the program waits for the rest when the terminal closes.
                terminal.press(keys);
                terminal.hang_up();
                let status = terminal.wait();
                assert!(status.code().is_some_and(|code| [0, GUARDED].contains(&code)), "{args:?} {keys:?}: {status}");
                by_itself += u32::from(status.code() == Some(0));
            }
        }
    }
    // The guard covers the moment between the check of the terminal and the read, which a busy machine hits occasionally.
    assert!(by_itself > 0, "none ended without the guard");
}
