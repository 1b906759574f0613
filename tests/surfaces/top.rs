//! `top` of an agent: the screen shows the same as `--once --json`, the API and the metrics.

use std::process::Command;

use serde_json::Value;

use super::api::{json, settled};
use crate::agent::daemon::{Daemon, secret, value, watching};
use crate::agent::metrics::{fragmented, fragments};
use crate::support::process::{run, wait_until};
use crate::top::terminal::Terminal;

fn top(url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    command.args(["top", "--url", url, "-i", "200ms"]);
    command
}

#[test]
fn screen_json_api_and_metrics_agree() {
    let (daemon, target) = settled("surfaces-top", "");
    let url = format!("http://{}", daemon.address);
    let pid = target.pid().to_string();
    let mut terminal = Terminal::start(&mut top(&url), 140, 40);
    let screen = terminal.wait_for("the process's row", |screen| {
        screen.has("surfaces-top") && screen.lines.iter().any(|line| line.trim_start().starts_with(&pid))
    });
    let row = screen.lines.iter().find(|line| line.trim_start().starts_with(&pid)).unwrap().clone();

    let once = run(top(&url).args(["--once", "--json"]));
    assert!(once.status.success(), "{}", once.err);
    let once: Value = serde_json::from_str(&once.out).unwrap();
    let one = &once["processes"][0];
    let api = json(&daemon, &format!("/api/v1/processes/{pid}"));
    let text = daemon.metrics();
    let label = format!("pid=\"{pid}\",comm=\"surfaces-top\",allocator=\"glibc\"");
    for key in ["extent_bytes", "resident_bytes", "live_bytes", "trimmable_bytes", "pinned_bytes", "kept_bytes", "cached_bytes"] {
        assert_eq!(one["ladder"][key], api["ladder"][key], "{key}");
        assert_eq!(value(&text, &format!("fragprof_heap_{key}"), &label), one["ladder"][key].as_f64(), "{key}");
    }
    assert_eq!((&one["verdict"], &one["fragmentation_ratio"]), (&api["verdict"], &api["fragmentation_ratio"]));
    for key in ["extent_bytes", "live_bytes", "trimmable_bytes", "pinned_bytes"] {
        let shown = fragprof::units::HumanBytes(one["ladder"][key].as_u64().unwrap()).to_string();
        assert!(row.contains(&shown), "{key} = {shown} in {row}");
    }
    assert!(row.contains(one["verdict"]["verdict"].as_str().unwrap()), "{row}");

    // The process's own view, with its address space.
    terminal.press("\r");
    let screen = terminal.wait_for("the address space", |screen| screen.has("▒▒▒") && screen.has("verdict"));
    assert!(screen.has("space    "), "{}", screen.lines.join("\n"));
    let before = terminal.written().len();
    terminal.resize(90, 20);
    // It clears the screen; a key that comes at the same moment may wait for the next one.
    wait_until("the new size is seen", || terminal.written()[before..].contains("\u{1b}[2J"));
    terminal.press("\u{1b}");
    terminal.wait_for("the list again", |screen| screen.has("PROCESS"));
    terminal.press("?");
    terminal.wait_for("the keys", |screen| screen.has("sort by the next column"));
    terminal.press(" q");
    assert!(terminal.wait().success());
    terminal.assert_restored();
}

#[test]
fn the_agents_socket_shows_all_to_its_user_without_a_token_and_is_removed_with_the_agent() {
    let target = fragmented(&fragments("surfaces-socket"), &["16"]);
    let place = tempfile::tempdir().unwrap();
    let socket = place.path().join("agent.sock");
    let mut daemon = Daemon::start_with("", |directory, _| {
        let token = directory.join("token");
        secret(&token, "0123456789abcdef0123");
        let config = watching(&["surfaces-socket"], "").replace("127.0.0.1:0", "0.0.0.0:0");
        std::fs::write(directory.join("agent.toml"), format!("{config}token_file = {token:?}\nsocket = {socket:?}\n")).unwrap();
    });
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&socket).unwrap().permissions()) & 0o777, 0o600);
    assert_eq!(daemon.get("/api/v1/processes").status, 401);
    daemon.metrics_with("fragprof_heap_pinned_bytes", &format!("pid=\"{}\"", target.pid()));
    let url = format!("unix:{}", socket.display());
    let once = run(top(&url).args(["--once", "--json"]));
    assert!(once.status.success(), "{}", once.err);
    let once: Value = serde_json::from_str(&once.out).unwrap();
    assert!(once["processes"][0]["ladder"]["pinned_bytes"].as_u64().unwrap() > 10 << 20, "{once}");
    let mut terminal = Terminal::start(&mut top(&url), 120, 20);
    terminal.wait_for("the list", |screen| screen.has("surfaces-socket") && screen.has(&url));
    terminal.press("q");
    assert!(terminal.wait().success());
    daemon.process.signal(rustix::process::Signal::TERM);
    daemon.process.wait(crate::support::LIMIT);
    assert!(!socket.exists());
}

#[test]
fn top_survives_the_agents_restart() {
    let (mut daemon, _target) = settled("surfaces-again", "");
    let url = format!("http://{}", daemon.address);
    let mut terminal = Terminal::start(&mut top(&url), 120, 20);
    terminal.wait_for("the list", |screen| screen.has("surfaces-again"));
    daemon.process.signal(rustix::process::Signal::TERM);
    daemon.process.wait(crate::support::LIMIT);
    terminal.wait_for("the agent to be reported as absent", |screen| screen.has("NO ANSWER") && screen.has("surfaces-again"));
    let config = crate::agent::daemon::watching(&["surfaces-again"], "").replace("127.0.0.1:0", &daemon.address.to_string());
    let _again = crate::agent::daemon::Daemon::start(&config);
    terminal.wait_for("figures again", |screen| !screen.has("NO ANSWER") && screen.has("surfaces-again"));
    terminal.press("q");
    assert!(terminal.wait().success());
}
