//! Which requests are answered, and the effect of hostile ones.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::daemon::{Daemon, secret, value, watching};
use crate::support::process::run;
use crate::support::{LIMIT, bpf};

const TOKEN: &str = "0123456789abcdef0123";

fn with_token(listen: &str) -> Daemon {
    Daemon::start_with("", |directory, _| {
        let token = directory.join("token");
        secret(&token, TOKEN);
        let config = watching(&["nothing-at-all"], "").replace("127.0.0.1:0", listen);
        std::fs::write(directory.join("agent.toml"), format!("{config}token_file = {token:?}\n")).unwrap();
    })
}

#[test]
fn without_the_token_only_metrics_and_health_answer() {
    let daemon = with_token("0.0.0.0:0");
    for path in ["/metrics", "/healthz"] {
        assert_eq!(daemon.get(path).status, 200, "{path}");
    }
    for path in ["/api/v1/processes", "/api/v1/processes/1", "/api/v1/processes/1/heap", "/api/v1/processes/x"] {
        let answer = daemon.get(path);
        assert_eq!(answer.status, 401, "{path}");
        assert!(answer.headers.to_ascii_lowercase().contains("www-authenticate: bearer"), "{}", answer.headers);
        assert!(!answer.body.contains(TOKEN));
    }
    let ask = |token: &str| {
        let request =
            format!("GET /api/v1/processes HTTP/1.1\r\nHost: node.example\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n");
        daemon.ask(&request).status
    };
    assert_eq!((ask(TOKEN), ask("0123456789abcdef0124"), ask("")), (200, 401, 401));
}

#[test]
fn without_a_token_a_foreign_host_name_is_refused() {
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    let ask = |host: &str| daemon.ask(&format!("GET /api/v1/processes HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")).status;
    assert_eq!((ask("localhost:1"), ask("127.0.0.1"), ask("rebound.example")), (200, 200, 403));
}

#[test]
fn an_address_beyond_loopback_needs_a_token() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.toml");
    std::fs::write(&path, "[server]\nlisten = '0.0.0.0:0'\n").unwrap();
    let done = run(std::process::Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["agent", "--config"]).arg(&path));
    assert_eq!(done.status.code(), Some(2));
    assert!(done.err.contains("server.token_file"), "{}", done.err);
}

#[test]
fn hostile_requests_get_client_errors_and_the_agent_keeps_running() {
    let mut daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    let long = "a".repeat(100_000);
    for path in [
        "/api/v1/processes/-1",
        "/api/v1/processes/99999999999999999999",
        "/api/v1/processes/%00",
        "/api/v1/processes/1%0a/heap",
        "/..%2f..",
        "/nothing",
    ] {
        let status = daemon.get(path).status;
        assert!((400..500).contains(&status), "{path}: {status}");
    }
    for request in [
        format!("GET /{long} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"),
        format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "b".repeat(1 << 20)),
        "POST /api/v1/processes HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\r\n\r\n".to_owned(),
    ] {
        let mut stream = TcpStream::connect(daemon.address).unwrap();
        // The agent may close before all was sent, and need not answer.
        let _ = stream.write_all(request.as_bytes());
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 5"), "{}", String::from_utf8_lossy(&answer));
    }
    assert_eq!(daemon.get("/healthz").status, 200);
    assert!(daemon.process.is_running());
}

#[test]
fn a_silent_connection_gives_way_to_one_that_sends_requests() {
    let daemon = Daemon::start(&format!("{}connections_max = 2\n", watching(&["nothing-at-all"], "")));
    let _held: Vec<_> = (0..2).map(|_| TcpStream::connect(daemon.address).unwrap()).collect();
    for _ in 0..3 {
        assert_eq!(daemon.get("/healthz").status, 200);
    }
    let displaced = value(&daemon.metrics(), "fragprof_http_connections_closed_total", "reason=\"displaced\"");
    assert!(displaced.is_some_and(|count| count >= 1.0), "{displaced:?}");
}

#[test]
fn half_sent_requests_lock_out_no_probe_and_are_closed_after_five_seconds() {
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    let address = daemon.address;
    let over = Arc::new(AtomicBool::new(false));
    // Sixty-four that are never completed, each replaced as soon as it is closed.
    let flood = {
        let over = Arc::clone(&over);
        std::thread::spawn(move || {
            let begin = || {
                let mut stream = TcpStream::connect(address).unwrap();
                stream.set_nonblocking(true).unwrap();
                let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nX: ");
                stream
            };
            let mut held: Vec<TcpStream> = (0..64).map(|_| begin()).collect();
            let mut renewed = 0;
            while !over.load(Ordering::Relaxed) {
                for stream in &mut held {
                    let closed = matches!(stream.read(&mut [0; 64]), Ok(0)) || stream.write_all(b"x").is_err();
                    if closed {
                        *stream = begin();
                        renewed += 1;
                    }
                }
                std::thread::sleep(Duration::from_millis(5));
            }
            renewed
        })
    };
    // One more that sends a byte now and then, on a machine without a flood.
    let quiet = Daemon::start(&watching(&["nothing-at-all"], ""));
    let mut slow = TcpStream::connect(quiet.address).unwrap();
    slow.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let began = Instant::now();
    let mut probes = 0;
    loop {
        assert_eq!(daemon.get("/healthz").status, 200, "probe {probes}");
        probes += 1;
        let _ = slow.write_all(b"G");
        match slow.read(&mut [0; 64]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            // Closed, or reset because a byte was on its way.
            Ok(0) | Err(_) => break,
            Ok(_) => panic!("an answer to no request"),
        }
        assert!(began.elapsed() < LIMIT, "it is never closed");
    }
    assert!(began.elapsed() >= Duration::from_millis(4500), "{:?}", began.elapsed());
    over.store(true, Ordering::Relaxed);
    assert!(flood.join().unwrap() > 0);
    assert!(probes > 10, "{probes}");
    let late = value(&quiet.metrics(), "fragprof_http_connections_closed_total", "reason=\"late\"");
    assert_eq!(late, Some(1.0));
}

#[test]
fn a_client_that_tries_tokens_is_slowed_and_logged_and_the_right_token_is_answered_at_once() {
    let daemon = with_token("127.0.0.1:0");
    let ask = |token: &str| {
        let request =
            format!("GET /api/v1/processes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n");
        let began = Instant::now();
        (daemon.ask(&request).status, began.elapsed())
    };
    let wrong: Vec<_> = (0..23).map(|_| ask("0123456789abcdef0124")).collect();
    assert!(wrong.iter().all(|(status, _)| *status == 401));
    assert!(wrong.last().unwrap().1 >= Duration::from_secs(1), "{wrong:?}");
    assert_eq!(ask(TOKEN).0, 200);
    let slowed = value(&daemon.metrics(), "fragprof_http_slowed_total", "");
    assert!(slowed.is_some_and(|count| (1.0..=3.0).contains(&count)), "{slowed:?}");
    let said = daemon.process.err.wait_for(LIMIT, |line| line.contains("without a valid token")).unwrap();
    assert!(said.contains("127.0.0.1") && !said.contains("0124"), "{said}");
}

#[test]
fn a_page_of_another_site_is_refused_whatever_its_browser_sends() {
    let daemon = Daemon::start(&watching(&["nothing-at-all"], "[profile]\non_demand = true"));
    let ask = |path: &str, headers: &str| daemon.ask(&format!("GET {path} HTTP/1.1\r\n{headers}Connection: close\r\n\r\n")).status;
    for path in ["/api/v1/processes", "/api/v1/processes/1/profile?seconds=1", "/metrics"] {
        assert_eq!(ask(path, "Host: localhost\r\nOrigin: http://evil.example\r\n"), 403, "{path}");
        assert_eq!(ask(path, "Host: localhost\r\nOrigin: null\r\n"), 403, "{path}");
        assert_eq!(ask(path, "Host: evil.example\r\n"), 403, "{path}");
    }
    assert_eq!(ask("/api/v1/processes", "Host: localhost:9746\r\nOrigin: http://localhost:9746\r\n"), 200);
    assert_eq!((ask("/metrics", "Host: 127.0.0.1\r\n"), ask("/healthz", "Host: evil.example\r\n")), (200, 200));
}

#[test]
fn an_unknown_parameter_is_refused_with_the_known_ones() {
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    for (path, known) in [
        ("/api/v1/history?form=-60", "`from`"),
        ("/api/v1/events?limits=1", "`limit`"),
        ("/api/v1/processes/1/profile?formats=pprof", "`format`"),
        ("/api/v1/processes/1/map?cell=1", "`cells`"),
        ("/debug/pprof/heap?id=1", "`pid`"),
        ("/api/v1/processes?pid=1", "no parameters"),
    ] {
        let answer = daemon.get(path);
        assert!(answer.status == 400 && answer.body.contains(known), "{path}: {} {}", answer.status, answer.body);
    }
}

#[test]
fn a_world_readable_token_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let (token, config) = (directory.path().join("token"), directory.path().join("agent.toml"));
    secret(&token, TOKEN);
    std::fs::set_permissions(&token, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    for table in ["server", "push"] {
        std::fs::write(&config, format!("[{table}]\ntoken_file = {token:?}\n")).unwrap();
        let done = run(std::process::Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["agent", "--check", "--config"]).arg(&config));
        assert!(done.status.code() == Some(2) && done.err.contains("mode 0644"), "{}", done.err);
    }
}

#[test]
fn a_host_with_probes_for_many_sites_leaves_the_agent_no_admin_rights() {
    let Some(_bpf) = bpf() else { return };
    let doctor = run(std::process::Command::new(env!("CARGO_BIN_EXE_fragprof")).args(["doctor", "--json"]));
    if !doctor.out.replace([' ', '\n'], "").contains("\"uprobe_multi\":{\"works\":\"yes\"}") {
        return;
    }
    let daemon = Daemon::start(&watching(&["nothing-at-all"], ""));
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.process.pid())).unwrap();
    let permitted = status.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap();
    let permitted = u64::from_str_radix(permitted.trim(), 16).unwrap();
    // CAP_SYS_ADMIN and CAP_SYS_RESOURCE are gone, CAP_BPF is there.
    assert_eq!((permitted >> 21 & 1, permitted >> 24 & 1, permitted >> 39 & 1), (0, 0, 1), "{status}");
}
