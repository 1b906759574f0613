//! For tests: a pusher with one profile to send, and a gRPC server that keeps what it received.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::io::Read;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, UNIX_EPOCH};

use h2::server;
use prost::Message;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::{Destination, PushProtocol, Pusher, Target};
use crate::agent::config::PushConfig;
use crate::model::attribution::{Attributed, Attributions};
use crate::model::sample::{Identity, ProcessSample};
use crate::model::snapshot::{Published, Snapshot};
use crate::process::ProcessId;
use crate::profile::pprof::proto;
use crate::profile::testing::shop;
use crate::profile::{Profile, ValueKind};
use crate::units::Pid;

/// When the profile was completed: its start plus its length.
pub const END_UNIX_NS: i64 = 1_795_257_610_250_000_000;

/// Decodes a file that was sent.
pub fn pprof(file: &[u8]) -> proto::Profile {
    let mut plain = Vec::new();
    flate2::read::GzDecoder::new(file).read_to_end(&mut plain).unwrap();
    proto::Profile::decode(plain.as_slice()).unwrap()
}

/// The sum of each sample type.
pub fn totals(message: &proto::Profile) -> Vec<(String, u64)> {
    let text = |index: i64| message.string_table[usize::try_from(index).unwrap()].clone();
    let sum = |at: usize| message.sample.iter().map(|sample| u64::try_from(sample.value[at]).unwrap()).sum();
    message.sample_type.iter().enumerate().map(|(at, kind)| (text(kind.r#type), sum(at))).collect()
}

/// The sum over a profile's stacks.
pub fn sum(profile: &Profile, kind: ValueKind) -> u64 {
    profile.stacks().iter().map(|stack| stack.values.get(kind)).sum()
}

/// Publishes this profile, completed at that time, as the newest of a process `sh{o}p` with the pid 42.
pub fn publish(published: &Published, profile: Profile, end_unix_ns: i64) {
    let now = Instant::now();
    let process = ProcessId { pid: Pid(42), start_ticks: 1 };
    let wall = UNIX_EPOCH + Duration::from_nanos(end_unix_ns.unsigned_abs());
    let board = Attributions::default();
    board.publish(process, Attributed { profile: Arc::new(profile), at: now, wall, blocks: None, rates: None, slowdown_ratio_est: None });
    let sample =
        ProcessSample { attributed: board.of(process), ..ProcessSample::new(Identity { process, stack: 0 }, "sh{o}p".into(), 0, 1) };
    published.store(Snapshot { processes: vec![Arc::new(sample)], ..Snapshot::empty(now) });
}

/// A pusher of published profiles, with a label.
pub fn start(url: &str, protocol: PushProtocol, interval: Duration, published: Arc<Published>) -> Pusher {
    start_with(&PushConfig { url: Some(url.to_owned()), protocol, ..PushConfig::default() }, interval, published)
}

/// As [`start`], with a configuration whose interval and labels are ignored.
pub fn start_with(config: &PushConfig, interval: Duration, published: Arc<Published>) -> Pusher {
    let labels = BTreeMap::from([("cluster".into(), "a".into())]);
    let destination = Destination::open(config).unwrap().unwrap();
    let target = Target {
        destination,
        protocol: config.protocol,
        interval,
        stacks_max: config.stacks_max,
        bytes_per_day_max: None,
        spool_directory: config.spool_directory.clone(),
        labels,
    };
    Pusher::start(target, published).unwrap()
}

/// Sends the profile of a process `sh{o}p` with the pid 42.
pub fn pusher(url: &str, protocol: PushProtocol) -> Pusher {
    let published = Arc::new(Published::new(Instant::now()));
    publish(&published, shop(), END_UNIX_NS);
    start(url, protocol, Duration::from_secs(3600), published)
}

/// An HTTP server that answers each connection's request with the next of these statuses, and passes on its head, in lower case, and its body.
pub fn http_server(statuses: &'static [u16]) -> (String, Receiver<(String, Vec<u8>)>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (send, requests) = channel();
    std::thread::spawn(move || {
        for status in statuses {
            let (mut stream, _) = listener.accept().unwrap();
            let (mut request, mut piece) = (Vec::new(), [0; 4096]);
            let got = loop {
                let read = stream.read(&mut piece).unwrap();
                request.extend_from_slice(&piece[..read]);
                let Some(end) = request.windows(4).position(|four| four == b"\r\n\r\n") else { continue };
                let head = String::from_utf8(request[..end].to_vec()).unwrap().to_lowercase();
                let length: usize = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap().parse().unwrap();
                if request.len() == end + 4 + length {
                    break (head, request.split_off(end + 4));
                }
            };
            let answer = format!("HTTP/1.1 {status} x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
            std::io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
            send.send(got).unwrap();
        }
    });
    (url, requests)
}

/// A received request.
pub struct Got {
    pub path: String,
    pub headers: http::HeaderMap,
    pub scheme: Option<String>,
    /// The message, without the five bytes that precede it.
    pub message: Vec<u8>,
}

/// A gRPC server that answers each request with the next of these statuses and an empty message.
pub fn grpc_server(statuses: &'static [u8]) -> (String, Receiver<Got>) {
    let (address, requests) = grpc_server_with(statuses, None);
    (format!("http://{address}"), requests)
}

/// A stream that a gRPC server reads and writes.
trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// As [`grpc_server`], with TLS if a configuration is given.
pub fn grpc_server_with(statuses: &'static [u8], tls: Option<ServerConfig>) -> (SocketAddr, Receiver<Got>) {
    let tls = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
    let (sender, requests) = channel();
    let (told, address) = channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            told.send(listener.local_addr().unwrap()).unwrap();
            let mut statuses = statuses.iter();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let stream: Box<dyn Io> = match &tls {
                    Some(acceptor) => match acceptor.accept(stream).await {
                        Ok(stream) => Box::new(stream),
                        // The client reports the reason.
                        Err(_) => continue,
                    },
                    None => Box::new(stream),
                };
                let Ok(mut connection) = server::handshake(stream).await else { continue };
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let Some(status) = statuses.next() else { return };
                    let (head, mut body) = request.into_parts();
                    let mut bytes = Vec::new();
                    // The body arrives while the connection is driven, which only accept does.
                    let reading = async {
                        while let Some(piece) = body.data().await {
                            let piece = piece.unwrap();
                            body.flow_control().release_capacity(piece.len()).unwrap();
                            bytes.extend_from_slice(&piece);
                        }
                    };
                    tokio::select! {
                        () = reading => {}
                        _ = connection.accept() => panic!("one request at a time"),
                    }
                    let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
                    assert_eq!((bytes[0], bytes.len()), (0, 5 + length), "one message, not compressed");
                    let answer = http::Response::builder().header("content-type", "application/grpc").body(()).unwrap();
                    let mut stream = respond.send_response(answer, false).unwrap();
                    stream.send_data(vec![0; 5].into(), false).unwrap();
                    let trailers = http::HeaderMap::from_iter([(
                        http::HeaderName::from_static("grpc-status"),
                        http::HeaderValue::from_str(&status.to_string()).unwrap(),
                    )]);
                    stream.send_trailers(trailers).unwrap();
                    let scheme = head.uri.scheme_str().map(str::to_owned);
                    let message = bytes.split_off(5);
                    sender.send(Got { path: head.uri.path().to_owned(), headers: head.headers, scheme, message }).unwrap();
                }
            }
        });
    });
    (address.recv().unwrap(), requests)
}
