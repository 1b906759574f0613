//! For tests: a pusher with one profile to send, and a gRPC server that keeps what it is sent.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant, SystemTime};

use h2::server;
use tokio::net::TcpListener;

use super::{PushProtocol, Pusher, Target};
use crate::agent::attribution::{Attributed, Attributions};
use crate::agent::sample::{Identity, ProcessSample};
use crate::agent::snapshot::{Published, Snapshot};
use crate::client::Server;
use crate::profile::testing::shop;
use crate::target::ProcessId;
use crate::units::Pid;

/// Sends the profile of a process `sh{o}p` with the pid 42.
pub fn pusher(url: &str, protocol: PushProtocol) -> Pusher {
    let now = Instant::now();
    let process = ProcessId { pid: Pid(42), start_ticks: 1 };
    let board = Attributions::default();
    let attributed = Attributed { profile: Arc::new(shop()), at: now, wall: SystemTime::now(), rates: None, slowdown_ratio_est: None };
    board.publish(process, attributed);
    let sample =
        ProcessSample { attributed: board.of(process), ..ProcessSample::new(Identity { process, stack: 0 }, "sh{o}p".into(), 0, 1) };
    let published = Arc::new(Published::new(now));
    published.store(Snapshot { processes: vec![Arc::new(sample)], ..Snapshot::empty(now) });
    let target = Target {
        server: Server::parse(url).unwrap(),
        protocol,
        interval: Duration::from_secs(3600),
        labels: BTreeMap::from([("cluster".into(), "a".into())]),
    };
    Pusher::start(target, published).unwrap()
}

/// A request as the server got it.
pub struct Got {
    pub path: String,
    /// The message, without the five bytes before it.
    pub message: Vec<u8>,
}

/// A gRPC server that answers each request with the next of these statuses and an empty message.
pub fn grpc_server(statuses: &'static [u8]) -> (String, Receiver<Got>) {
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
                let mut connection = server::handshake(stream).await.unwrap();
                while let Some(Ok((request, mut respond))) = connection.accept().await {
                    let Some(status) = statuses.next() else { return };
                    let (head, mut body) = request.into_parts();
                    let mut bytes = Vec::new();
                    // The body comes while the connection is driven, which accept alone does.
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
                    sender.send(Got { path: head.uri.path().to_owned(), message: bytes.split_off(5) }).unwrap();
                }
            }
        });
    });
    (format!("http://{}", address.recv().unwrap()), requests)
}
