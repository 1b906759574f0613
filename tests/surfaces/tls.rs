//! `top` of an agent behind TLS, the agent's checks of its own TLS settings, and both with OpenSSL.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::client::{Access, Address, Identity, Server};
use serde_json::Value;

use super::api::settled;
use crate::agent::daemon::secret;
use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::{Done, Process, run};
use crate::support::tls::{Authority, VALID, config, serve};

/// Serves the agent's responses over TLS, like a proxy in front of it.
fn in_front_of(agent: std::net::SocketAddr, authority: &Authority, years: std::ops::Range<i32>) -> u16 {
    serve(config(&authority.sign(&["localhost"], years), None), move |head, _| {
        let mut stream = TcpStream::connect(agent).unwrap();
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer
    })
}

fn top(url: &str, arguments: &[&str], roots: &Path) -> Done {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
    command.args(["top", "--once", "--json", "--url", url]).args(arguments);
    // A proxy that does not exist.
    command.envs([("https_proxy", "http://127.0.0.1:1"), ("HTTPS_PROXY", "http://127.0.0.1:1"), ("ALL_PROXY", "http://127.0.0.1:1")]);
    run(command.env("SSL_CERT_FILE", roots).env_remove("SSL_CERT_DIR"))
}

#[test]
fn top_shows_an_agent_behind_tls_whose_authority_the_system_or_the_user_trusts() {
    let (daemon, target) = settled("surfaces-tls", "");
    let place = tempfile::tempdir().unwrap();
    let (authority, other) = (Authority::new(), Authority::new());
    let file = |name: &str, text: &str| -> PathBuf {
        let path = place.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (right, wrong, none) = (file("right", &authority.certificate), file("wrong", &other.certificate), file("none", ""));
    let url = format!("https://localhost:{}", in_front_of(daemon.address, &authority, VALID));
    let named = |path: &Path| ["--ca-file".to_owned(), path.display().to_string()];
    // The named authorities are used, not the system's.
    for (roots, named) in [(&right, None), (&wrong, Some(named(&right))), (&none, Some(named(&right)))] {
        let arguments: Vec<&str> = named.iter().flatten().map(String::as_str).collect();
        let done = top(&url, &arguments, roots);
        assert!(done.status.success(), "{}", done.err);
        let view: Value = serde_json::from_str(&done.out).unwrap();
        let pids: Vec<&Value> = view["processes"].as_array().unwrap().iter().map(|process| &process["pid"]).collect();
        assert!(pids.contains(&&Value::from(target.pid())), "{pids:?}");
    }
    let expired = format!("https://localhost:{}", in_front_of(daemon.address, &authority, 2001..2002));
    let plain = format!("http://{}", daemon.address);
    let text = file("text", "no certificate");
    let cases = [
        (&url, None, &wrong, 3, "none of the trusted authorities has signed it"),
        (&url, Some(named(&wrong)), &right, 3, "none of the trusted authorities has signed it"),
        (&url.replace("localhost", "127.0.0.1"), None, &right, 3, "not valid for name"),
        (&expired, None, &right, 3, "it expired "),
        (&plain.replace("http:", "https:"), None, &right, 3, "does not speak TLS"),
        (&url, None, &none, 2, "no root certificates"),
        (&url, Some(named(&text)), &right, 2, "no certificate in PEM"),
        (&plain, Some(named(&right)), &right, 2, "--ca-file is for https"),
    ];
    for (url, named, roots, status, fault) in cases {
        let arguments: Vec<&str> = named.iter().flatten().map(String::as_str).collect();
        let done = top(url, &arguments, roots);
        assert_eq!(done.status.code(), Some(status), "{fault}: {}", done.err);
        assert!(done.err.contains(fault), "{fault}: {}", done.err);
    }
}

#[test]
fn an_agent_does_not_start_with_settings_for_tls_that_it_cannot_use() {
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    std::fs::write(path("ca"), "no certificate").unwrap();
    secret(&path("token"), "0123456789abcdef");
    let agent = |push: &str, check: bool| {
        std::fs::write(path("agent.toml"), format!("[server]\nlisten = '127.0.0.1:0'\n[push]\n{push}")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_fragprof"));
        command.args(["agent", "--config"]).arg(path("agent.toml"));
        run(if check { command.arg("--check") } else { &mut command })
    };
    let (ca, missing) = (path("ca"), path("missing"));
    let cases = [
        (format!("url = 'https://h'\ntls.ca_file = {ca:?}"), 2, ["push.tls.ca_file", ca.to_str().unwrap()]),
        (format!("url = 'https://h'\ntls.ca_file = {missing:?}"), 1, ["push.tls.ca_file", missing.to_str().unwrap()]),
        (format!("url = 'http://h'\ntls.ca_file = {ca:?}"), 2, ["push.tls.ca_file", "http://h:80"]),
    ];
    for (push, status, words) in &cases {
        for check in [true, false] {
            let done = agent(push, check);
            assert_eq!(done.status.code(), Some(*status), "{push}: {}", done.err);
            assert!(words.iter().all(|word| done.err.contains(word)), "{push}: {}", done.err);
        }
    }
    let done = agent(&format!("url = 'http://h'\ntoken_file = {:?}\ntenant = 'a'", path("token")), true);
    assert!(done.status.success(), "{}", done.err);
}

#[test]
fn certificates_and_a_server_of_openssl_are_understood() {
    let Some(openssl) = tool("openssl") else { return };
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name).display().to_string();
    let openssl = |arguments: &[&str]| {
        let done = run(Command::new(&openssl).args(arguments));
        assert!(done.status.success(), "{}", done.err);
    };
    // RSA; the other tests use elliptic curves.
    for (name, subject) in [("ca", "/CN=ca"), ("server", "/CN=server"), ("client", "/CN=client")] {
        let (key, out) = (path(&format!("{name}.key")), path(&format!("{name}.pem")));
        let mut arguments =
            vec!["req", "-x509", "-newkey", "rsa:2048", "-noenc", "-days", "2", "-subj", subject, "-keyout", &key, "-out", &out];
        let (ca, ca_key) = (path("ca.pem"), path("ca.key"));
        if name != "ca" {
            let more =
                ["-CA", &ca, "-CAkey", &ca_key, "-addext", "basicConstraints=critical,CA:FALSE", "-addext", "subjectAltName=DNS:localhost"];
            arguments.extend(more);
        }
        openssl(&arguments);
    }
    for version in ["-tls1_2", "-tls1_3"] {
        let mut command = Command::new(tool("openssl").unwrap());
        command.args(["s_server", "-accept", "127.0.0.1:0", "-www", "-Verify", "1", "-verify_return_error", version]);
        command.args(["-cert", &path("server.pem"), "-key", &path("server.key"), "-CAfile", &path("ca.pem")]);
        let server = Process::start_piped(&mut command);
        let line = server.out.wait_for(LIMIT, |line| line.starts_with("ACCEPT ")).unwrap_or_else(|| panic!("{}", server.err));
        let port = line.rsplit_once(':').unwrap().1;
        let bytes = |name: &str| std::fs::read(path(name)).unwrap();
        let get = |identity| {
            let access = Access { authorities: Some(bytes("ca.pem")), identity, ..Access::default() };
            Server::new(Address::parse(&format!("https://localhost:{port}")).unwrap(), &access).unwrap().get("/")
        };
        let error = get(None).unwrap_err().to_string();
        assert!(error.contains("client certificate"), "{version}: {error}");
        let page = get(Some(Identity { certificates: bytes("client.pem"), key: bytes("client.key") })).unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains("s_server") && page.contains("CN=client") | page.contains("CN = client"), "{version}: {page}");
    }
}
