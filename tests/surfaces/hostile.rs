//! Invalid and extreme requests, generated from the published description of the API: `make fuzz-http` is the long form, which uses
//! schemathesis.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::Value;

use crate::agent::daemon::{Daemon, secret, watching};
use crate::support::LIMIT;

const TOKEN: &str = "0123456789abcdef0123";
/// Paths that respond without the token.
const OPEN: [&str; 3] = ["/metrics", "/healthz", "/readyz"];

fn guarded() -> Daemon {
    Daemon::start_with("", |directory, _| {
        let token = directory.join("token");
        secret(&token, TOKEN);
        let config = watching(&["nothing-at-all"], "").replace("127.0.0.1:0", "0.0.0.0:0");
        std::fs::write(directory.join("agent.toml"), format!("{config}token_file = {token:?}\n")).unwrap();
    })
}

/// Sends raw bytes and returns the response's status: `None` = the connection was closed without a response.
fn status(daemon: &Daemon, request: &[u8]) -> Option<u16> {
    let mut stream = TcpStream::connect(("127.0.0.1", daemon.address.port())).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    // The agent may close the connection before everything was sent.
    let _ = stream.write_all(request);
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()
}

/// The documented paths, with numbers for their parameters, and some others.
fn paths() -> Vec<String> {
    let document: Value = serde_json::from_str(include_str!("../../docs/api/openapi.json")).unwrap();
    let described = document["paths"].as_object().unwrap().keys().map(|path| path.replace("{pid}", "1").replace("{id}", "1"));
    described.chain(["/", "/pages/main.js", "/pages/../metrics", "//metrics", "/metrics/", "/api"].map(str::to_owned)).collect()
}

#[test]
fn without_the_token_only_metrics_and_health_respond_to_any_request() {
    let mut daemon = guarded();
    let method = "GET|HEAD|POST|PUT|DELETE|OPTIONS|PATCH|TRACE|CONNECT|PROPFIND";
    let header = "(Authorization: (Bearer|Basic|Digest|bearer) [ -~]{0,40})|(Host: [ -~]{0,20})|(X-Forwarded-For: 127\\.0\\.0\\.1)\
                  |(Sec-Fetch-Site: [a-z-]{0,12})|(Range: bytes=[0-9]{0,4}-)|([A-Za-z-]{1,12}: [ -~]{0,30})";
    let request =
        (method, proptest::sample::select(paths()), "(\\?[ -~&&[^ #]]{0,30})?", proptest::collection::vec(header, 0..4), "[ -~]{0,40}");
    let mut runner = TestRunner::new(Config { cases: 300, failure_persistence: None, ..Config::default() });
    let done = runner.run(&request, |(method, path, query, headers, body)| {
        let headers: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let text = format!(
            "{method} {path}{query} HTTP/1.1\r\nHost: node\r\n{headers}Connection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        let is_open = OPEN.contains(&path.as_str());
        match status(&daemon, text.as_bytes()) {
            // Before the first round the agent is not ready.
            Some(503) => prop_assert!(path == "/readyz", "{text}"),
            Some(200..=399) => prop_assert!(is_open && matches!(method.as_str(), "GET" | "HEAD"), "{text}"),
            Some(400..=499) | None => {}
            other => prop_assert!(false, "{other:?}: {text}"),
        }
        Ok(())
    });
    done.unwrap();
    assert_eq!(daemon.get("/healthz").status, 200);
    assert!(daemon.process.is_running());
    assert!(!daemon.process.err.to_string().contains("panicked"), "{}", daemon.process.err);
}

#[test]
fn bytes_that_are_not_a_request_get_client_errors_or_nothing() {
    let mut daemon = guarded();
    let piece = proptest::collection::vec(any::<u8>(), 0..200);
    let words = "(GET|POST|/metrics|HTTP/1\\.[01]|HTTP/2|PRI \\* HTTP/2\\.0|Transfer-Encoding: chunked|Content-Length: -?[0-9]{0,20}|[0-9a-f]{0,9}|\r\n|\r\n\r\n| |:|\\x00){0,24}";
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    let done = runner.run(&(words, piece), |(words, bytes)| {
        let request = [words.as_bytes(), &bytes].concat();
        let answered = status(&daemon, &request);
        prop_assert!(answered.is_none_or(|status| status < 500 || status == 505), "{answered:?}: {words:?} {bytes:?}");
        Ok(())
    });
    done.unwrap();
    assert_eq!(daemon.get("/healthz").status, 200);
    assert!(daemon.process.is_running());
}
