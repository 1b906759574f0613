//! Tests pushes over TLS, with secrets from files that change, and the errors for invalid files or servers.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustls::ServerConfig;
use tempfile::TempDir;

use super::grpc::Grpc;
use super::{Destination, Pusher, Sent, parca, testing};
use crate::agent::config::{Config, ConfigError, PushConfig, PushProtocol};
use crate::client::testing::{Authority, VALID, config, listen, ok, read_request, serve};
use crate::model::snapshot::Published;
use crate::profile::testing::shop;

const WITHIN: Duration = Duration::from_secs(20);

/// Files that no other user may read.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a file atomically, as secrets are usually replaced.
    fn write(&self, name: &str, text: &str) -> PathBuf {
        let (path, draft) = (self.path(name), self.path("draft"));
        fs::write(&draft, text).unwrap();
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(&draft, &path).unwrap();
        path
    }
}

fn pusher(push: &PushConfig) -> Pusher {
    let published = Arc::new(Published::new(Instant::now()));
    testing::publish(&published, shop(), testing::END_UNIX_NS);
    testing::start_with(push, Duration::from_secs(3600), published)
}

fn to(port: u16, protocol: PushProtocol) -> PushConfig {
    PushConfig { url: Some(format!("https://localhost:{port}")), protocol, ..PushConfig::default() }
}

/// A configuration for gRPC, which TLS must negotiate.
fn with_http2(mut config: ServerConfig) -> ServerConfig {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + WITHIN;
    while !condition() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn pyroscope_gets_a_profile_by_tls_with_certificate_user_and_tenant() {
    let (authority, files) = (Authority::new(), Files::new());
    let (sender, heads) = channel();
    let port = serve(config(&authority.sign(&["localhost"], VALID), Some(&authority)), move |head, body| {
        sender.send((head.to_owned(), body.len())).unwrap();
        ok("")
    });
    let client = authority.sign(&["agent"], VALID);
    let mut push = to(port, PushProtocol::Pyroscope);
    push.tls.ca_file = Some(files.write("ca", &authority.certificate));
    push.tls.cert_file = Some(files.write("cert", &client.certificate));
    push.tls.key_file = Some(files.write("key", &client.key));
    push.basic_auth_user = Some("Aladdin".into());
    push.basic_auth_password_file = Some(files.write("password", "open sesame\n"));
    push.tenant = Some("team-a".into());
    let pusher = pusher(&push);
    let (head, bytes) = heads.recv_timeout(WITHIN).unwrap();
    let head = head.to_ascii_lowercase();
    assert!(head.starts_with("post /ingest?name=") && bytes > 100, "{head}");
    for line in ["authorization: basic qwxhzgrpbjpvcgvuihnlc2ftzq==", "x-scope-orgid: team-a", &format!("host: localhost:{port}")] {
        assert!(head.lines().any(|one| one == line), "{line} in {head}");
    }
    wait_until("it counts as sent", || pusher.counters.sent.load(Ordering::Relaxed) == 1);
    assert_eq!(pusher.counters.failures.load(Ordering::Relaxed), 0);
    pusher.stop();
}

#[test]
fn parca_gets_a_profile_by_tls_with_certificate_and_the_newest_token() {
    let (authority, files) = (Authority::new(), Files::new());
    let tls = with_http2(config(&authority.sign(&["localhost"], VALID), Some(&authority)));
    // UNAVAILABLE, then OK.
    let (address, requests) = testing::grpc_server_with(&[14, 0], Some(tls));
    let client = authority.sign(&["agent"], VALID);
    let mut push = to(address.port(), PushProtocol::Parca);
    push.tls.ca_file = Some(files.write("ca", &authority.certificate));
    push.tls.cert_file = Some(files.write("cert", &client.certificate));
    push.tls.key_file = Some(files.write("key", &client.key));
    push.token_file = Some(files.write("token", "the old one\n"));
    push.tenant = Some("team-a".into());
    let pusher = pusher(&push);
    let first = requests.recv_timeout(WITHIN).unwrap();
    files.write("token", "the new one\n");
    let second = requests.recv_timeout(WITHIN).unwrap();
    assert_eq!((first.path.as_str(), first.scheme.as_deref()), (parca::METHOD, Some("https")));
    assert_eq!(
        (&first.headers["authorization"], &second.headers["authorization"]),
        (&"Bearer the old one".parse().unwrap(), &"Bearer the new one".parse().unwrap())
    );
    assert_eq!(second.headers["x-scope-orgid"], "team-a");
    assert_eq!(first.message, second.message);
    pusher.stop();
}

#[test]
fn a_new_token_is_used_with_the_next_push() {
    let files = Files::new();
    let (sender, heads) = channel();
    let asked = AtomicUsize::new(0);
    let port = listen(move |mut stream| {
        let (head, _) = read_request(&mut stream).unwrap();
        let status = if asked.fetch_add(1, Ordering::Relaxed) == 0 { 503 } else { 200 };
        sender.send(head.to_ascii_lowercase()).unwrap();
        let _ = std::io::Write::write_all(&mut stream, format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\n\r\n").as_bytes());
    });
    let push = PushConfig {
        url: Some(format!("http://127.0.0.1:{port}")),
        token_file: Some(files.write("token", "the old one\n")),
        ..PushConfig::default()
    };
    let pusher = pusher(&push);
    assert!(heads.recv_timeout(WITHIN).unwrap().contains("authorization: bearer the old one\r\n"));
    files.write("token", "the new one\n");
    assert!(heads.recv_timeout(WITHIN).unwrap().contains("authorization: bearer the new one\r\n"));
    pusher.stop();
}

#[test]
fn profiles_wait_until_the_right_authority_is_in_the_file() {
    for protocol in [PushProtocol::Pyroscope, PushProtocol::Parca] {
        let (authority, files) = (Authority::new(), Files::new());
        let tls = config(&authority.sign(&["localhost"], VALID), None);
        let (sender, arrived) = channel();
        let port = match protocol {
            PushProtocol::Pyroscope => serve(tls, move |_, _| {
                sender.send(()).unwrap();
                ok("")
            }),
            _ => {
                let (address, requests) = testing::grpc_server_with(&[0], Some(with_http2(tls)));
                std::thread::spawn(move || requests.recv().map(|_| sender.send(())));
                address.port()
            }
        };
        let mut push = to(port, protocol);
        push.tls.ca_file = Some(files.write("ca", &Authority::new().certificate));
        let pusher = pusher(&push);
        let failures = || pusher.counters.failures.load(Ordering::Relaxed);
        wait_until("the wrong authority fails", || failures() == 1);
        fs::remove_file(files.path("ca")).unwrap();
        wait_until("no authority fails", || failures() == 2);
        files.write("ca", &authority.certificate);
        arrived.recv_timeout(WITHIN).unwrap();
        assert_eq!((failures(), pusher.counters.refused.load(Ordering::Relaxed)), (2, 0));
        pusher.stop();
    }
}

/// The result of a call.
fn call(push: &PushConfig, time_max: Duration) -> String {
    let destination = Destination::open(push).unwrap().unwrap();
    match Grpc::new(&destination.server().clone().with_time_max(time_max)).unwrap().send(parca::METHOD, b"x") {
        Sent::Later(why) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn grpc_says_what_is_wrong_with_a_server() {
    let (authority, other, files) = (Authority::new(), Authority::new(), Files::new());
    let ca = files.write("ca", &authority.certificate);
    let asking = |port| {
        let mut push = to(port, PushProtocol::Parca);
        push.tls.ca_file = Some(ca.clone());
        push
    };
    let serving = |tls| testing::grpc_server_with(&[], Some(tls)).0.port();
    let good = || authority.sign(&["localhost"], VALID);
    let cases = [
        (serving(with_http2(config(&other.sign(&["localhost"], VALID), None))), "none of the trusted authorities has signed it"),
        (serving(with_http2(config(&authority.sign(&["localhost"], 2001..2002), None))), "it expired "),
        (serving(with_http2(config(&authority.sign(&["elsewhere"], VALID), None))), "not valid for name \"localhost\""),
        (serving(with_http2(config(&good(), Some(&authority)))), "client certificate"),
        (serving(config(&good(), None)), "it does not offer HTTP/2"),
        (listen(|mut stream| drop(std::io::Write::write_all(&mut stream, b"garbage\r\n"))), "it does not speak TLS"),
    ];
    for (port, fault) in cases {
        let why = call(&asking(port), WITHIN);
        assert!(why.contains(fault), "{fault}: {why}");
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let why = call(&asking(silent.local_addr().unwrap().port()), Duration::from_millis(300));
    assert!(why.contains("no complete response within 0.3 s"), "{why}");
    let gone = listen(drop);
    let plain = PushConfig { url: Some(format!("http://127.0.0.1:{gone}")), ..PushConfig::default() };
    assert!(!call(&plain, WITHIN).is_empty());
}

/// The error of a configuration at the start.
fn error(text: &str) -> ConfigError {
    let config = Config::parse(text, Path::new("agent.toml")).unwrap();
    config.check().and_then(|()| Destination::open(&config.push)).unwrap_err()
}

#[test]
fn settings_that_do_not_go_together_are_refused_by_key() {
    for (text, key, reason) in [
        ("url = 'http://h'\ntls.ca_file = '/x'", "push.tls.ca_file", "https"),
        ("url = 'http://h'\ntls.cert_file = '/x'\ntls.key_file = '/x'", "push.tls.cert_file", "https"),
        ("url = 'unix:/x'\ntls.key_file = '/x'", "push.tls.key_file", "https"),
        ("url = 'https://h'\ntls.cert_file = '/x'", "push.tls.cert_file", "push.tls.key_file"),
        ("url = 'https://h'\ntls.key_file = '/x'", "push.tls.key_file", "push.tls.cert_file"),
        ("basic_auth_user = 'a'", "push.basic_auth_user", "push.basic_auth_password_file"),
        ("basic_auth_password_file = '/x'", "push.basic_auth_password_file", "push.basic_auth_user"),
        ("basic_auth_user = 'a:b'\nbasic_auth_password_file = '/x'", "push.basic_auth_user", "colon"),
        ("basic_auth_user = 'a'\nbasic_auth_password_file = '/x'\ntoken_file = '/x'", "push.token_file", "not both"),
        ("tenant = ''", "push.tenant", "1 to 150"),
        ("tenant = 'a b'", "push.tenant", "1 to 150"),
        ("url = 'ftp://h'", "push.url", "https://"),
    ] {
        let error = error(&format!("[push]\n{text}\n"));
        assert!(matches!(error, ConfigError::Setting { .. }), "{text}: {error:?}");
        let said = error.to_string();
        assert!(said.starts_with(&format!("{key}: ")) && said.contains(reason), "{text}: {said}");
    }
    let said = error("[push]\nurl = 'https://me:hunter2@h'\n").to_string();
    assert!(said.starts_with("push.url: ") && !said.contains("hunter2"), "{said}");
}

#[test]
fn an_invalid_file_is_named_with_its_key() {
    let (authority, files) = (Authority::new(), Files::new());
    let pair = authority.sign(&["agent"], VALID);
    let good = [("ca", &authority.certificate), ("cert", &pair.certificate), ("key", &pair.key)];
    let other = authority.sign(&["agent"], VALID).key;
    let keys = [("ca", "push.tls.ca_file"), ("cert", "push.tls.cert_file"), ("key", "push.tls.key_file"), ("token", "push.token_file")];
    for (name, key) in keys {
        // Missing, invalid, and empty.
        for text in [None, Some("hunter2\u{0}\n"), Some("")] {
            good.iter().for_each(|(name, text)| drop(files.write(name, text)));
            files.write("token", "0123456789abcdef\n");
            match text {
                Some(text) => drop(files.write(name, text)),
                None => fs::remove_file(files.path(name)).unwrap(),
            }
            let path = |name| files.path(name).display().to_string();
            let error = error(&format!(
                "[push]\nurl = 'https://h'\ntoken_file = '{}'\n[push.tls]\nca_file = '{}'\ncert_file = '{}'\nkey_file = '{}'\n",
                path("token"),
                path("ca"),
                path("cert"),
                path("key"),
            ));
            assert_eq!(matches!(error, ConfigError::Read { .. }), text.is_none(), "{error:?}");
            let said = error.to_string();
            assert!(said.contains(key) && said.contains(&path(name)) && !said.contains("hunter2"), "{said}");
        }
    }
    let tls = |name: &str| {
        format!(
            "[push]\nurl = 'https://h'\n[push.tls]\nca_file = '{}'\ncert_file = '{}'\nkey_file = '{}'\n",
            files.path("ca").display(),
            files.path("cert").display(),
            files.path(name).display()
        )
    };
    good.iter().for_each(|(name, text)| drop(files.write(name, text)));
    files.write("other", &other);
    assert!(error(&tls("other")).to_string().contains("it is not the key of the certificate"));
    // A key that every user may read is rejected.
    fs::set_permissions(files.path("key"), fs::Permissions::from_mode(0o644)).unwrap();
    let said = error(&tls("key")).to_string();
    assert!(said.contains("push.tls.key_file") && said.contains("mode 0644") && said.contains("chmod 600"), "{said}");
}
