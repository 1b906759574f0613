//! Start, readiness, reload and stop.

use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;

use super::daemon::{Daemon, value, watching};
use super::metrics::{fragmented, fragments};
use crate::support::LIMIT;
use crate::support::process::wait_until;

#[test]
fn a_term_signal_ends_the_agent_cleanly() {
    let mut daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    daemon.process.signal(Signal::TERM);
    let status = daemon.process.wait(LIMIT);
    assert_eq!(status.code(), Some(0), "{}", daemon.process.err);
}

#[test]
fn the_service_manager_gets_ready_watchdog_reload_and_stop_messages() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(LIMIT)).unwrap();
    let daemon = Daemon::start_with(&watching(&["nothing-at-all"], ""), |_, command| {
        // No pid: the agent is the process that inherits the environment.
        command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("WATCHDOG_USEC", "300000").env_remove("WATCHDOG_PID");
    });
    let wait_for = |wanted: &str| {
        let mut bytes = [0; 256];
        loop {
            let got = manager.recv(&mut bytes).unwrap_or_else(|error| panic!("no {wanted}: {error}"));
            let text = String::from_utf8_lossy(&bytes[..got]).into_owned();
            if text.starts_with(wanted) {
                return text;
            }
        }
    };
    wait_for("READY=1");
    wait_for("WATCHDOG=1");
    wait_for("WATCHDOG=1");
    daemon.process.signal(Signal::HUP);
    assert!(wait_for("RELOADING=1").contains("MONOTONIC_USEC="));
    wait_for("READY=1");
    daemon.process.signal(Signal::TERM);
    wait_for("STOPPING=1");
}

#[test]
fn a_reload_changes_what_is_watched_and_a_broken_file_changes_nothing() {
    let target = fragmented(&fragments("fragments-hup"), &["16"]);
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    wait_until("readiness", || daemon.get("/readyz").status == 200);
    let label = format!("pid=\"{}\"", target.pid());
    assert!(!daemon.metrics().contains(&label));
    daemon.configure(&watching(&["fragments-hup"], ""));
    daemon.process.signal(Signal::HUP);
    daemon.metrics_with("fragprof_heap_live_bytes", &label);
    daemon.configure("[discovery]\nincluded = []\n");
    daemon.process.signal(Signal::HUP);
    wait_until("the error is counted", || value(&daemon.metrics(), "fragprof_agent_config_reloads_total", "result=\"error\"") == Some(1.0));
    assert!(daemon.metrics().contains(&label));
    assert!(daemon.process.err.wait_for(LIMIT, |line| line.contains("included")).is_some());
}

#[test]
fn an_exec_makes_another_process() {
    let program = fragments("fragments-exec");
    let mut shell = crate::support::process::Process::start_piped(
        std::process::Command::new("sh").args(["-c", "echo ready; read line; exec \"$0\" 16"]).arg(&program),
    );
    shell.out.wait_for(LIMIT, |line| line == "ready").unwrap();
    let daemon = Daemon::start(&watching(&["sh", "fragments-exec"], ""));
    let of = |comm: &str| format!("pid=\"{}\",comm=\"{comm}\"", shell.pid());
    daemon.metrics_with("fragprof_heap_live_bytes", &of("sh"));
    let label = of("fragments-exec");
    drop(shell.input());
    let text = daemon.metrics_with("fragprof_heap_live_bytes", &label);
    // More than the shell ever had.
    assert!(value(&text, "fragprof_heap_extent_bytes", &label).unwrap() > f64::from(20 << 20), "{text}");
}
