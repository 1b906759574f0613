//! Who is answered, and what hostile requests do.

use super::daemon::{Daemon, watching};
use crate::support::process::run;

const TOKEN: &str = "0123456789abcdef0123";

fn with_token(listen: &str) -> Daemon {
    Daemon::start_with("", |directory, _| {
        let token = directory.join("token");
        std::fs::write(&token, TOKEN).unwrap();
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
fn without_a_token_a_foreign_host_name_is_turned_away() {
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
fn hostile_requests_get_client_errors_and_the_agent_lives_on() {
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
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(daemon.address).unwrap();
        // The agent may close before all was sent, and need not say anything.
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
fn connections_beyond_the_limit_are_closed_and_counted() {
    let daemon = Daemon::start(&format!("{}connections_max = 2\n", watching(&["nothing-at-all"], "")));
    let held: Vec<_> = (0..2).map(|_| std::net::TcpStream::connect(daemon.address).unwrap()).collect();
    let mut refused = std::net::TcpStream::connect(daemon.address).unwrap();
    assert_eq!(std::io::Read::read(&mut refused, &mut [0]).unwrap_or(0), 0);
    drop(held);
    crate::support::process::wait_until("a free place", || {
        std::net::TcpStream::connect(daemon.address).is_ok_and(|mut stream| {
            use std::io::{Read, Write};
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
            let mut text = String::new();
            stream.read_to_string(&mut text).is_ok()
                && text.contains("fragprof_http_connections_refused_total ")
                && !text.contains("fragprof_http_connections_refused_total 0\n")
        })
    });
}
