//! A listener with limits on open connections, on the time that a request takes to arrive, and on silence.

use std::future::Future;
use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio::time::{Instant, Sleep, sleep};

use super::ServerState;
use super::connections::{Connections, Phase};
use crate::agent::worker::lock;

/// Time limit from the first byte of a request, or from the connection, to its complete head.
const HEAD_MAX: Duration = Duration::from_secs(5);
/// Time limit for an answer: a recording on request takes five minutes at most.
const ANSWER_MAX: Duration = Duration::from_secs(330);
/// Silence after which a connection is closed. Longer than the usual minute between two scrapes, so that a scraper keeps its connection.
const SILENCE_MAX: Duration = Duration::from_secs(75);
/// Pause after an error of accept, which mostly means that no descriptors are left.
const RETRY: Duration = Duration::from_millis(200);

/// A bound socket.
#[derive(Debug)]
pub enum Bound {
    /// An address.
    Tcp(std::net::TcpListener),
    /// A path. Root and the agent's own user may connect.
    Unix(std::os::unix::net::UnixListener),
}

#[derive(Debug)]
enum Inner {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Inner {
    async fn accept(&self) -> io::Result<(Box<dyn Stream>, Option<IpAddr>)> {
        Ok(match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                (Box::new(stream), Some(address.ip().to_canonical()))
            }
            Self::Unix(listener) => {
                let stream = listener.accept().await?.0;
                let uid = stream.peer_cred()?.uid();
                if uid != 0 && uid != rustix::process::geteuid().as_raw() {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                (Box::new(stream), None)
            }
        })
    }
}

/// The stream of a connection.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug> Stream for T {}

/// The connections of a listener; a dropped sender closes its connection.
type Table = Arc<Mutex<Connections<oneshot::Sender<()>>>>;

/// The listener.
#[derive(Debug)]
pub struct Limited {
    listener: Inner,
    table: Table,
    state: Arc<ServerState>,
}

impl Limited {
    /// Accepts at most `connections_max` connections at once; refused and displaced ones are counted in `state`. Must run in a runtime.
    pub(super) fn new(bound: Bound, connections_max: usize, state: Arc<ServerState>) -> io::Result<Self> {
        let listener = match bound {
            Bound::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                Inner::Tcp(TcpListener::from_std(listener)?)
            }
            Bound::Unix(listener) => {
                listener.set_nonblocking(true)?;
                Inner::Unix(UnixListener::from_std(listener)?)
            }
        };
        Ok(Self { listener, table: Arc::new(Mutex::new(Connections::new(connections_max))), state })
    }
}

/// The client of a connection.
#[derive(Debug, Clone)]
pub struct Peer {
    /// Its address; `None` for a unix socket.
    pub client: Option<IpAddr>,
    /// Whether the connection is one of those reserved for health probes.
    pub reserved: bool,
    id: u64,
    table: Option<Table>,
}

impl Peer {
    /// Waits. Meanwhile the connection is the first to be closed when another one needs its slot.
    pub async fn hold_back(&self, time: Duration) {
        self.set_phase(Phase::Slowed);
        sleep(time).await;
        self.set_phase(Phase::Answering);
    }

    fn set_phase(&self, phase: Phase) {
        if let Some(table) = &self.table {
            lock(table).set_phase(self.id, phase, std::time::Instant::now());
        }
    }
}

impl Connected<IncomingStream<'_, Limited>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Limited>) -> Self {
        stream.remote_addr().clone()
    }
}

impl Listener for Limited {
    type Io = Connection;
    type Addr = Peer;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, client)) => {
                    let (close, closed) = oneshot::channel();
                    let place = lock(&self.table).place(client, close, std::time::Instant::now());
                    let Some(place) = place else {
                        self.state.refused.fetch_add(1, Ordering::Relaxed);
                        continue;
                    };
                    if place.displaces {
                        self.state.displaced.fetch_add(1, Ordering::Relaxed);
                    }
                    let peer = Peer { client, reserved: place.reserved, id: place.id, table: Some(Arc::clone(&self.table)) };
                    return (Connection::new(stream, peer.clone(), closed, Arc::clone(&self.state)), peer);
                }
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<Peer> {
        Ok(Peer { client: None, reserved: false, id: 0, table: None })
    }
}

/// Finds the end of a request's head: an empty line after the first line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum HeadEnd {
    /// Only line ends so far, which are skipped before a request.
    #[default]
    Before,
    /// In a line.
    Line,
    /// After the end of a line.
    LineEnd,
    /// After that and a carriage return.
    Return,
}

impl HeadEnd {
    /// Whether the head ends with one of these bytes.
    fn is_in(&mut self, bytes: &[u8]) -> bool {
        for byte in bytes {
            *self = match (*self, byte) {
                (Self::Before, b'\r' | b'\n') => Self::Before,
                (Self::LineEnd | Self::Return, b'\n') => return true,
                (_, b'\n') => Self::LineEnd,
                (Self::LineEnd, b'\r') => Self::Return,
                _ => Self::Line,
            };
        }
        false
    }
}

/// A connection that holds a slot, and is closed when its time is over.
#[derive(Debug)]
pub struct Connection {
    stream: Box<dyn Stream>,
    peer: Peer,
    phase: Phase,
    head: HeadEnd,
    /// When this phase is over.
    timer: Pin<Box<Sleep>>,
    /// Completes when the slot is given to another connection.
    closed: oneshot::Receiver<()>,
    is_closed: bool,
    state: Arc<ServerState>,
}

impl Connection {
    fn new(stream: Box<dyn Stream>, peer: Peer, closed: oneshot::Receiver<()>, state: Arc<ServerState>) -> Self {
        let timer = Box::pin(sleep(HEAD_MAX));
        Self { stream, peer, phase: Phase::Receiving, head: HeadEnd::default(), timer, closed, is_closed: false, state }
    }

    fn enter(&mut self, phase: Phase, time: Duration) {
        self.phase = phase;
        self.timer.as_mut().reset(Instant::now() + time);
        self.peer.set_phase(phase);
    }

    /// Handles bytes read.
    fn received(&mut self, bytes: &[u8]) {
        if self.phase == Phase::Idle && !bytes.is_empty() {
            self.head = HeadEnd::default();
            self.enter(Phase::Receiving, HEAD_MAX);
        }
        // Bytes that arrive during an answer are a body, which no handler reads, or the next request, which is handled afterwards.
        if self.phase == Phase::Receiving && self.head.is_in(bytes) {
            self.enter(Phase::Answering, ANSWER_MAX);
        }
    }

    /// Handles bytes written.
    fn progressed(&mut self) {
        self.phase = Phase::Idle;
        self.timer.as_mut().reset(Instant::now() + SILENCE_MAX);
        if let Some(table) = &self.peer.table {
            lock(table).progressed(self.peer.id, std::time::Instant::now());
        }
    }

    /// An error once the connection's time is over, or its slot was given to another.
    fn end(&mut self, context: &mut Context<'_>) -> Option<io::Error> {
        if self.is_closed || Pin::new(&mut self.closed).poll(context).is_ready() {
            self.is_closed = true;
            return Some(io::ErrorKind::ConnectionAborted.into());
        }
        if self.timer.as_mut().poll(context).is_ready() {
            self.is_closed = true;
            if self.phase == Phase::Receiving {
                self.state.late.fetch_add(1, Ordering::Relaxed);
            }
            return Some(io::ErrorKind::TimedOut.into());
        }
        None
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(table) = &self.peer.table {
            lock(table).remove(self.peer.id);
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(error) = self.end(context) {
            return Poll::Ready(Err(error));
        }
        let before = buffer.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        if matches!(result, Poll::Ready(Ok(()))) {
            self.received(buffer.filled().get(before..).unwrap_or_default());
        }
        result
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(error) = self.end(context) {
            return Poll::Ready(Err(error));
        }
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        match result {
            Poll::Ready(Ok(_)) => self.progressed(),
            Poll::Pending if self.phase != Phase::Stuck => {
                self.enter(Phase::Stuck, SILENCE_MAX);
                // The timer was replaced since the check above.
                let _ = self.timer.as_mut().poll(context);
            }
            _ => {}
        }
        result
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_head_is_found_however_it_is_cut() {
        let text = b"\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n";
        for cut in 0..text.len() {
            let mut head = HeadEnd::default();
            assert!(!head.is_in(&text[..cut]), "{cut}");
            assert!(head.is_in(&text[cut..]), "{cut}");
        }
        for (unfinished, finished) in [("GET / HTTP/1.1\n", "\n"), ("\n\n\n\r\n\nGET /\r\nX: \r\r\n", "\r\n")] {
            let mut head = HeadEnd::default();
            assert!(!head.is_in(unfinished.as_bytes()), "{unfinished:?}");
            assert!(head.is_in(finished.as_bytes()), "{unfinished:?}");
        }
    }
}
