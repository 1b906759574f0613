//! Tests what the client sends, how it handles valid responses, and how it handles all others. The servers count the bytes that they send.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use proptest::prelude::*;

use super::testing::{Authority, Pair, VALID, config, config_of, listen, ok, read_request, serve};
use super::*;

/// Far longer than a response on this machine takes.
const LONG: Duration = Duration::from_secs(20);
/// Much shorter than that.
const SHORT: Duration = Duration::from_millis(500);

fn server(url: &str) -> Server {
    with(url, &Access::default())
}

fn with(url: &str, access: &Access) -> Server {
    Server::new(Address::parse(url).unwrap(), access).unwrap().with_time_max(LONG)
}

fn trusting(port: u16, authority: &Authority) -> Server {
    with(&format!("https://localhost:{port}"), &trust(authority))
}

fn trust(authority: &Authority) -> Access {
    Access { authorities: Some(authority.certificate.clone().into_bytes()), ..Access::default() }
}

/// A server that answers each request with these bytes and closes.
fn answering(answer: impl Into<Vec<u8>>) -> Server {
    let answer = answer.into();
    server(&format!(
        "http://127.0.0.1:{}",
        listen(move |mut stream| {
            let _ = read_request(&mut stream);
            let _ = stream.write_all(&answer);
        })
    ))
}

/// A server that answers each request with `start` and then repeats `rest` endlessly as long as it is read. Counts its bytes.
fn endless(start: &'static str, rest: &'static str) -> (Server, Arc<AtomicU64>) {
    let sent = Arc::<AtomicU64>::default();
    let counted = Arc::clone(&sent);
    let port = listen(move |mut stream| {
        let _ = read_request(&mut stream);
        let _ = stream.write_all(start.as_bytes());
        let piece = rest.repeat(1 + 16_384 / rest.len());
        while stream.write_all(piece.as_bytes()).is_ok() {
            counted.fetch_add(piece.len() as u64, Ordering::Relaxed);
        }
    });
    (server(&format!("http://127.0.0.1:{port}")), sent)
}

fn get(server: &Server) -> Result<String, ClientError> {
    server.get("/x").map(|body| String::from_utf8(body).unwrap())
}

/// The error, which must name the server and be returned soon.
fn refused(server: &Server) -> (ClientError, String) {
    let began = Instant::now();
    let error = get(server).unwrap_err();
    assert!(began.elapsed() < LONG);
    let text = error.to_string();
    assert!(text.contains(&server.address().to_string()), "{text}");
    (error, text)
}

#[test]
fn answers_are_read_with_a_length_in_chunks_and_to_the_end() {
    assert_eq!(get(&answering("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc")).unwrap(), "ab");
    let chunked = "HTTP/1.1 201 x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n";
    assert_eq!(get(&answering(chunked)).unwrap(), "abcd");
    assert_eq!(get(&answering("HTTP/1.0 200 yes\r\n\r\nrest")).unwrap(), "rest");
    assert_eq!(get(&answering("HTTP/1.1 204 none\r\n\r\n")).unwrap(), "");
    assert_eq!(get(&answering("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na")).unwrap(), "a");
}

#[test]
fn a_rejection_is_reported_with_its_status_and_the_servers_message() {
    match get(&answering("HTTP/1.0 404 no\r\n\r\nrest")) {
        Err(ClientError::Status { status: 404, message }) => assert_eq!(message, "rest"),
        other => panic!("{other:?}"),
    }
    let error = get(&answering(format!("HTTP/1.1 500 no\r\n\r\n\u{1b}[2J{}", "x".repeat(1 << 20)))).unwrap_err().to_string();
    assert!(error.starts_with("500: \\u{1b}[2Jxxx") && error.len() < 400, "{error}");
    // Its message is truncated, but the status is known.
    let error = get(&answering("HTTP/1.1 429 slow\r\nContent-Length: 9\r\n\r\nlat")).unwrap_err();
    assert!(matches!(error, ClientError::Status { status: 429, .. }), "{error}");
}

#[test]
fn a_request_has_its_path_host_credentials_tenant_and_body() {
    let (sender, requests) = channel();
    let port = listen(move |mut stream| {
        sender.send(read_request(&mut stream).unwrap()).unwrap();
        stream.write_all(&ok("")).unwrap();
    });
    let access = Access { credentials: Credentials::Token("abc".into()), tenant: Some("team-a".into()), ..Access::default() };
    with(&format!("http://127.0.0.1:{port}/prefix/"), &access).post("/ingest?a=b%20c", "text/plain", b"the body").unwrap();
    let (head, body) = requests.recv().unwrap();
    let lines: Vec<String> = head.lines().map(str::to_ascii_lowercase).collect();
    assert!(head.starts_with("POST /prefix/ingest?a=b%20c HTTP/1.1\r\n"), "{head}");
    let host = format!("host: 127.0.0.1:{port}");
    for line in
        [&host, "connection: close", "authorization: bearer abc", "x-scope-orgid: team-a", "content-type: text/plain", "content-length: 8"]
    {
        assert_eq!(lines.iter().filter(|one| *one == line).count(), 1, "{line} in {head}");
    }
    assert_eq!(body, b"the body");
}

#[test]
fn a_unix_socket_is_a_server_like_any_other() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("a socket");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (head, _) = read_request(&mut stream).unwrap();
        stream.write_all(&ok(&head)).unwrap();
    });
    let address = format!("unix:{}", path.display());
    let head = get(&server(&address)).unwrap();
    assert!(head.starts_with("GET /x HTTP/1.1\r\n") && head.to_ascii_lowercase().contains("\r\nhost: localhost\r\n"), "{head}");
    // Nothing accepts connections any more.
    assert!(matches!(refused(&server(&address)).0, ClientError::Io { .. }));
    std::fs::remove_file(&path).unwrap();
    assert!(refused(&server(&address)).1.contains("No such file"));
}

#[test]
fn a_redirect_is_refused_and_nothing_is_sent_to_where_it_leads() {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    other.set_nonblocking(true).unwrap();
    let elsewhere = format!("http://{}/stolen", other.local_addr().unwrap());
    for status in [301, 302, 303, 307, 308] {
        let redirecting = answering(format!("HTTP/1.1 {status} x\r\nLocation: {elsewhere}\r\nContent-Length: 0\r\n\r\n"));
        match get(&redirecting) {
            Err(ClientError::Status { status: got, message }) => {
                assert_eq!(got, status);
                assert!(message.contains(&elsewhere) && message.contains("not followed"), "{message}");
            }
            answer => panic!("{answer:?}"),
        }
    }
    assert_eq!(other.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
}

#[test]
fn a_secret_that_the_server_repeats_is_not_shown() {
    let port = listen(|mut stream| {
        let (head, _) = read_request(&mut stream).unwrap();
        let _ = write!(stream, "HTTP/1.1 403 no\r\nContent-Length: {}\r\n\r\n{head}", head.len());
    });
    let url = format!("http://127.0.0.1:{port}");
    let basic = Credentials::Basic { user: "me".into(), password: "hunter2hunter2".into() };
    for credentials in [Credentials::Token("hunter2hunter2".into()), basic] {
        let error = get(&with(&url, &Access { credentials, ..Access::default() })).unwrap_err().to_string();
        assert!(error.contains("[secret]") && !error.contains("hunter2") && !error.contains("bWU6"), "{error}");
    }
}

#[test]
fn a_server_that_does_not_speak_http_is_reported_as_such() {
    for garbage in [
        "\0\u{1}\u{2}",
        "SSH-2.0-OpenSSH_9.2\r\n",
        "HTTP/1.1 abc x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        "HTTP/1.1 200 OK\r\n: \r\n\r\n",
    ] {
        let (error, text) = refused(&answering(garbage));
        assert!(matches!(error, ClientError::Protocol { .. }), "{garbage:?}: {error:?}");
        assert!(text.contains("does not speak HTTP/1.1"), "{text}");
    }
    let speaks_first = listen(|mut stream| {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        let _ = read_request(&mut stream);
    });
    let (error, text) = refused(&server(&format!("http://127.0.0.1:{speaks_first}")));
    assert!(matches!(error, ClientError::Protocol { .. }), "{error:?} {text}");
    for chunks in ["zz\r\nabc\r\n", "3\r\nabcX", "-1\r\n", "fffffffffffffffff\r\n", "3 \u{b}\r\nabc\r\n"] {
        let (error, text) = refused(&answering(format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}")));
        assert!(matches!(error, ClientError::Protocol { .. }), "{chunks:?}: {error:?} {text}");
    }
}

#[test]
fn an_incomplete_response_is_an_error() {
    let halves = [
        "",
        "HTTP/1.1 200",
        "HTTP/1.1 200 OK\r\nContent-Le",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
    ];
    for half in halves {
        let (error, text) = refused(&answering(half));
        assert!(matches!(error, ClientError::Cut(_)), "{half:?}: {error:?}");
        assert!(text.contains("ended before the response was complete"), "{text}");
    }
}

#[test]
fn a_vanished_server_is_reported_with_the_systems_error() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (error, text) = refused(&server(&format!("http://{gone}")));
    assert!(matches!(error, ClientError::Io { .. }) && text.contains("Connection refused"), "{text}");
    // It closes without reading what it is sent: the system resets the connection.
    let port = listen(|mut stream| {
        let _ = stream.read(&mut [0; 1]);
        let _ = stream.shutdown(Shutdown::Write);
    });
    let error = server(&format!("http://127.0.0.1:{port}")).post("/x", "text/plain", &vec![0; 8 << 20]).unwrap_err();
    assert!(matches!(error, ClientError::Io { .. } | ClientError::Cut(_)), "{error:?}");
    let (error, text) = refused(&server("http://no-such-host.invalid:1"));
    assert!(matches!(error, ClientError::Io { .. }), "{text}");
}

#[test]
fn a_response_before_the_end_of_the_request_is_reported() {
    let body = vec![0; 32 << 20];
    let port = listen(|mut stream| {
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 413 no\r\nContent-Length: 9\r\n\r\ntoo large");
    });
    match server(&format!("http://127.0.0.1:{port}")).post("/x", "text/plain", &body) {
        Err(ClientError::Status { status: 413, message }) => assert_eq!(message, "too large"),
        other => panic!("{other:?}"),
    }
    let authority = Authority::new();
    let port = serve(config(&authority.sign(&["localhost"], VALID), Some(&authority)), |_, _| ok(""));
    let error = trusting(port, &authority).post("/x", "text/plain", &body).unwrap_err();
    assert!(error.to_string().contains("it demands a client certificate"), "{error}");
}

#[test]
fn a_slow_server_costs_no_more_than_the_time_limit() {
    let silent = listen(|mut stream| while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {});
    // Each byte arrives in time, but the whole response does not.
    let trickling = listen(|mut stream| {
        let _ = read_request(&mut stream);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n");
        while stream.write_all(b"a").is_ok() {
            std::thread::sleep(SHORT / 50);
        }
    });
    let (interim, sent) = endless("", "HTTP/1.1 100 Continue\r\n\r\n");
    let address = |port| format!("http://127.0.0.1:{port}");
    // A connection in TCP's backlog does not count as a response, and the TLS handshake counts towards the time.
    let unheard = TcpListener::bind("127.0.0.1:0").unwrap();
    let of_tls = with(&format!("https://{}", unheard.local_addr().unwrap()), &trust(&Authority::new()));
    for server in [server(&address(silent)), server(&address(trickling)), interim, of_tls] {
        let server = server.with_time_max(SHORT);
        let began = Instant::now();
        let (error, text) = refused(&server);
        assert!(matches!(error, ClientError::TooSlow { .. }) && text.contains("no complete response within 0.5 s"), "{error:?}");
        assert!(began.elapsed() >= SHORT && began.elapsed() < SHORT * 10, "{:?}", began.elapsed());
    }
    assert!(sent.load(Ordering::Relaxed) > 0);
}

#[test]
fn an_endless_answer_costs_no_more_than_its_limits() {
    // Bytes that the sockets of both sides may buffer.
    const ON_THE_WAY: u64 = 16 << 20;
    let heads = [("HTTP/1.1 200 OK\r\n", "a: b\r\n"), ("HTTP/1.1 200 OK\r\nx: ", "aaaa"), ("", "HTTP/1.1 200 OK")];
    for (start, rest) in heads {
        let (server, sent) = endless(start, rest);
        let (error, text) = refused(&server);
        assert!(matches!(error, ClientError::Protocol { .. }), "{text}");
        assert!(sent.load(Ordering::Relaxed) < HEAD_BYTES_MAX as u64 + ON_THE_WAY);
    }
    let bodies = [("HTTP/1.1 200 OK\r\n\r\n", "aaaa"), ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "a\r\naaaaaaaaaa\r\n")];
    for (start, rest) in bodies {
        let (server, sent) = endless(start, rest);
        let (error, text) = refused(&server);
        assert!(matches!(error, ClientError::TooLong { .. }) && text.contains(&ANSWER_BYTES_MAX.to_string()), "{text}");
        assert!(sent.load(Ordering::Relaxed) < 2 * ANSWER_BYTES_MAX + ON_THE_WAY);
    }
    // A chunk extension, and fields after the last chunk.
    for rest in ["1;", "0\r\nx: "] {
        let start = if rest.len() == 2 {
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;"
        } else {
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nx: "
        };
        let (server, sent) = endless(start, "aaaa");
        let (error, text) = refused(&server);
        assert!(matches!(error, ClientError::Protocol { .. }), "{rest}: {text}");
        assert!(sent.load(Ordering::Relaxed) < ON_THE_WAY);
    }
    // The announced length is enough for the error.
    let (server, sent) = endless("HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551613\r\n\r\n", "aaaa");
    assert!(matches!(refused(&server).0, ClientError::TooLong { .. }));
    assert!(sent.load(Ordering::Relaxed) < ON_THE_WAY);
}

#[test]
fn a_download_is_written_as_it_arrives_within_its_limits() {
    let large = vec![7; 3 << 20];
    let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", large.len());
    let server = answering([head.as_bytes(), &large].concat());
    let mut out = Vec::new();
    assert_eq!(server.download("/x", &mut out, 3 << 20, LONG).unwrap(), 3 << 20);
    assert_eq!(out, large);
    // The announced length is enough for the error: nothing is written.
    let mut out = Vec::new();
    assert!(
        matches!(server.download("/x", &mut out, (3 << 20) - 1, LONG), Err(ClientError::TooLong { bytes_max, .. }) if bytes_max == (3 << 20) - 1)
    );
    assert!(out.is_empty());
    // Without a length it ends at the limit.
    let (endless, sent) = endless("HTTP/1.1 200 OK\r\n\r\n", "aaaa");
    let mut out = Vec::new();
    assert!(matches!(endless.download("/x", &mut out, 1 << 20, LONG), Err(ClientError::TooLong { .. })));
    assert!(out.len() <= 1 << 20 && sent.load(Ordering::Relaxed) < 64 << 20);
    // Its time is its own.
    let silent = listen(|mut stream| while matches!(stream.read(&mut [0; 4096]), Ok(1..)) {});
    let began = Instant::now();
    let slow = self::server(&format!("http://127.0.0.1:{silent}"));
    assert!(matches!(slow.download("/x", &mut Vec::new(), 1, SHORT), Err(ClientError::TooSlow { time_max: SHORT, .. })));
    assert!(began.elapsed() < SHORT * 10);
    // A full disk is not the server's fault.
    let mut full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    assert!(matches!(answering(ok("abc")).download("/x", &mut full, 10, LONG), Err(ClientError::Store { .. })));
    // A rejection is none of the file's content.
    let mut out = Vec::new();
    assert!(matches!(
        answering("HTTP/1.0 404 no\r\n\r\nrest").download("/x", &mut out, 10, LONG),
        Err(ClientError::Status { status: 404, .. })
    ));
    assert!(out.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_answer_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), text in "(HTTP/1\\.[01] [0-9]{0,4} |\r\n|[a-f0-9;:]|Transfer-Encoding: chunked|Content-Length: ){0,20}") {
        for answer in [bytes, text.into_bytes()] {
            let _ = answering(answer).get("/");
        }
    }
}

#[test]
fn a_certificate_of_the_trusted_authority_is_accepted_by_name_and_by_address() {
    let authority = Authority::new();
    let pair = authority.sign(&["localhost", "127.0.0.1"], VALID);
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let port = serve(config_of(&pair, None, &[version]), |head, body| ok(&format!("{head}{}", body.len())));
        for host in ["localhost", "127.0.0.1"] {
            let server = with(&format!("https://{host}:{port}/prefix"), &trust(&authority));
            let got = server.post("/x", "text/plain", &vec![0; 1 << 20]).unwrap();
            let got = String::from_utf8(got).unwrap();
            assert!(got.starts_with("POST /prefix/x HTTP/1.1\r\n") && got.ends_with("1048576"), "{got}");
            assert!(got.to_ascii_lowercase().contains(&format!("\r\nhost: {host}:{port}\r\n")), "{got}");
        }
    }
}

#[test]
fn any_other_certificate_is_refused_with_its_fault() {
    let (authority, other) = (Authority::named("ours"), Authority::new());
    let cases = [
        (other.sign(&["localhost"], VALID), "none of the trusted authorities has signed it"),
        (Authority::named("ours").sign(&["localhost"], VALID), "none of the trusted authorities has signed it; one has the name"),
        (authority.sign(&["localhost"], 2001..2002), "it expired "),
        (authority.sign(&["localhost"], 2098..2099), "it becomes valid in "),
        (authority.sign(&["elsewhere.example"], VALID), "not valid for name \"localhost\""),
        (authority.sign(&["127.0.0.1"], VALID), "not valid for name \"localhost\""),
    ];
    for (pair, fault) in cases {
        let asked = Arc::<AtomicU64>::default();
        let counted = Arc::clone(&asked);
        let port = serve(config(&pair, None), move |_, _| {
            counted.fetch_add(1, Ordering::Relaxed);
            ok("")
        });
        let (error, text) = refused(&trusting(port, &authority));
        assert!(
            matches!(error, ClientError::Tls { .. }) && text.contains("its certificate is refused") && text.contains(fault),
            "{fault}: {text}"
        );
        assert_eq!(asked.load(Ordering::Relaxed), 0, "{fault}: the request was sent");
    }
}

#[test]
fn a_server_that_demands_a_certificate_gets_the_configured_one_and_no_other() {
    let (authority, other) = (Authority::new(), Authority::new());
    let pair = authority.sign(&["localhost"], VALID);
    let identity = |pair: Pair| Some(Identity { certificates: pair.certificate.into_bytes(), key: pair.key.into_bytes() });
    for version in [&rustls::version::TLS12, &rustls::version::TLS13] {
        let port = serve(config_of(&pair, Some(&authority), &[version]), |_, _| ok("in"));
        let asking = |identity| with(&format!("https://localhost:{port}"), &Access { identity, ..trust(&authority) });
        assert_eq!(get(&asking(identity(authority.sign(&["a client"], VALID)))).unwrap(), "in");
        let cases = [
            (None, "client certificate"),
            (identity(other.sign(&["a client"], VALID)), "it refuses the client certificate"),
            (identity(authority.sign(&["a client"], 2001..2002)), "it refuses the client certificate"),
        ];
        for (identity, fault) in cases {
            let (error, text) = refused(&asking(identity));
            assert!(matches!(error, ClientError::Tls { .. }) && text.contains(fault), "{version:?}: {text}");
        }
    }
}

#[test]
fn tls_and_plain_http_are_not_mistaken_for_each_other() {
    let authority = Authority::new();
    let plain = listen(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n");
    });
    let (error, text) = refused(&trusting(plain, &authority));
    assert!(matches!(error, ClientError::Tls { .. }) && text.contains("does not speak TLS"), "{text}");
    let port = serve(config(&authority.sign(&["localhost"], VALID), None), |_, _| ok("secret"));
    let (error, text) = refused(&server(&format!("http://localhost:{port}")));
    assert!(matches!(error, ClientError::Protocol { .. }), "{text}");
    let mute = listen(|stream: TcpStream| stream.shutdown(Shutdown::Both).unwrap());
    let (_, text) = refused(&trusting(mute, &authority));
    assert!(text.contains("handshake") || text.contains("reset"), "{text}");
}

#[test]
fn a_truncated_tls_response_is_an_error() {
    // Without a length, only the end of TLS shows that the response is complete.
    let authority = Authority::new();
    let config = Arc::new(config(&authority.sign(&["localhost"], VALID), None));
    let port = listen(move |tcp| {
        let mut stream = rustls::StreamOwned::new(rustls::ServerConnection::new(Arc::clone(&config)).unwrap(), tcp);
        read_request(&mut stream).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\nthe first half").unwrap();
        stream.sock.shutdown(Shutdown::Write).unwrap();
    });
    let (error, text) = refused(&trusting(port, &authority));
    assert!(matches!(error, ClientError::Cut(_)), "{text}");
}

#[test]
fn a_second_request_resumes_the_session_of_the_first() {
    let authority = Authority::new();
    let config = Arc::new(config(&authority.sign(&["localhost"], VALID), None));
    let kinds = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&kinds);
    let port = listen(move |tcp| {
        let mut stream = rustls::StreamOwned::new(rustls::ServerConnection::new(Arc::clone(&config)).unwrap(), tcp);
        read_request(&mut stream).unwrap();
        seen.lock().unwrap().push(stream.conn.handshake_kind().unwrap());
        stream.write_all(&ok("")).unwrap();
    });
    let server = trusting(port, &authority);
    get(&server).unwrap();
    get(&server).unwrap();
    assert_eq!(*kinds.lock().unwrap(), [rustls::HandshakeKind::Full, rustls::HandshakeKind::Resumed]);
}

#[test]
fn invalid_files_have_distinct_errors() {
    let authority = Authority::new();
    let pair = authority.sign(&["a client"], VALID);
    let other = authority.sign(&["a client"], VALID);
    let fault = |access: &Access| Server::new(Address::parse("https://h").unwrap(), access).unwrap_err();
    let authorities = |text: &str| Access { authorities: Some(text.as_bytes().to_vec()), ..Access::default() };
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for (text, words) in [
        ("", "no certificate in PEM"),
        ("nothing of the kind", "no certificate in PEM"),
        (&pair.key, "no certificate in PEM"),
        ("-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n", "it is not PEM"),
        (&authority.certificate[..authority.certificate.len() / 2], "it is not PEM"),
        (&format!("{}{broken}", authority.certificate), "its certificate 2 cannot be used"),
    ] {
        let error = fault(&authorities(text));
        assert!(matches!(error, AccessError::Authorities(_)) && error.to_string().contains(words), "{text}: {error}");
    }
    let shown = |certificate: &str, key: &str| {
        let identity = Some(Identity { certificates: certificate.as_bytes().to_vec(), key: key.as_bytes().to_vec() });
        fault(&Access { identity, ..trust(&authority) })
    };
    assert!(matches!(shown("", &pair.key), AccessError::Certificate(_)));
    assert!(matches!(shown(broken, &pair.key), AccessError::Certificate(_)));
    assert!(matches!(shown(&pair.certificate, ""), AccessError::Key(_)));
    assert!(matches!(shown(&pair.certificate, &pair.certificate), AccessError::Key(_)));
    let error = shown(&pair.certificate, &other.key);
    assert_eq!(error, AccessError::Key("it is not the key of the certificate".into()));
}
