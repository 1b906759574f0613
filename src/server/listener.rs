//! A listener with a limit on open connections and on silence: a client that sends or takes nothing does not hold its place.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, Sleep, sleep};

use super::ServerState;

/// Silence after which a connection is closed. Longer than the usual minute between two scrapes, so that a scraper keeps its connection.
const SILENCE_MAX: Duration = Duration::from_secs(75);
/// Pause after an error of accept, which mostly means that there are no descriptors left.
const RETRY: Duration = Duration::from_millis(200);

/// A socket that is bound already.
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
    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
            Self::Unix(listener) => {
                let stream = listener.accept().await?.0;
                let uid = stream.peer_cred()?.uid();
                if uid != 0 && uid != rustix::process::geteuid().as_raw() {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                Box::new(stream)
            }
        })
    }
}

/// What a connection reads and writes.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug> Stream for T {}

/// The listener.
#[derive(Debug)]
pub struct Limited {
    listener: Inner,
    places: Arc<Semaphore>,
    state: Arc<ServerState>,
}

impl Limited {
    /// Takes at most `connections_max` connections at once; further ones are closed, and counted in `state`. Called inside a runtime.
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
        Ok(Self { listener, places: Arc::new(Semaphore::new(connections_max)), state })
    }
}

impl Listener for Limited {
    type Io = Connection;
    /// Nobody asks who it was.
    type Addr = ();

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            match self.listener.accept().await {
                Ok(stream) => match Arc::clone(&self.places).try_acquire_owned() {
                    Ok(place) => return (Connection { stream, silence: Box::pin(sleep(SILENCE_MAX)), _place: place }, ()),
                    Err(_) => {
                        self.state.refused.fetch_add(1, Ordering::Relaxed);
                    }
                },
                Err(error) => {
                    tracing::debug!("cannot accept a connection: {error}");
                    sleep(RETRY).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection that holds its place, and ends after silence.
#[derive(Debug)]
pub struct Connection {
    stream: Box<dyn Stream>,
    silence: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Connection {
    /// Passes a result on; on progress the silence begins anew, and without any for too long it is an error.
    fn watched<T>(&mut self, result: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.silence.as_mut().reset(Instant::now() + SILENCE_MAX);
            return result;
        }
        self.silence.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.watched(result, context)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watched(result, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
