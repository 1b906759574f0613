//! Connections: TCP, TLS over it, or a unix socket.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};

use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream, lookup_host};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::address::Place;
use super::tls::in_words;
use super::{CONNECT_MAX, ClientError, Server};

/// The protocol of a connection, as negotiated by TLS (RFC 7301).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Http1,
    Http2,
}

impl Protocol {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Http1 => b"http/1.1",
            Self::Http2 => b"h2",
        }
    }
}

/// A stream that can be read and written.
trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for T {}

/// A connection. Its errors are readable sentences, and the first one is kept, because its users may lose it.
pub(crate) struct Stream {
    inner: Box<dyn ReadWrite>,
    /// Why no more can be written.
    unsent: Option<io::Error>,
    fault: Fault,
}

/// The first error of a connection, if there was one.
pub(crate) type Fault = Arc<OnceLock<String>>;

impl Stream {
    fn new(inner: impl ReadWrite + 'static) -> Self {
        Self { inner: Box::new(inner), unsent: None, fault: Fault::default() }
    }

    /// Where its first error is stored.
    pub(crate) fn fault(&self) -> Fault {
        Arc::clone(&self.fault)
    }

    fn noted<T>(&self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        polled.map_err(|error| {
            let error = in_words(error);
            // Later errors follow from the first.
            let _ = self.fault.set(error.to_string());
            error
        })
    }

    /// If a server rejects the client's certificate or the length of a body, it says so and closes, whatever is still being sent. Writing
    /// then fails before the reason is read. So this waits: reading ends with the reason, or with this error. All users that write also
    /// read.
    fn written<T>(&mut self, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        match polled {
            Poll::Ready(Err(error)) if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                self.unsent = Some(error);
                Poll::Pending
            }
            polled => self.noted(polled),
        }
    }
}

impl Server {
    /// Connects. The caller limits the time.
    pub(crate) async fn connect(&self, protocol: Protocol) -> Result<Stream, ClientError> {
        let (host, port) = match &self.address.place {
            Place::Unix(path) => return UnixStream::connect(path).await.map(Stream::new).map_err(|error| self.failed(error)),
            Place::Tcp { host, port } => (host.as_str(), *port),
        };
        let stream = connect_tcp(host, port).await.map_err(|error| self.failed(error))?;
        let Some(config) = &self.access.tls else { return Ok(Stream::new(stream)) };
        let name = ServerName::try_from(host.to_owned()).map_err(|_| self.tls_failed(format!("no certificate can be for {host:?}")))?;
        let mut config = config.as_ref().clone();
        config.alpn_protocols = vec![protocol.name().to_vec()];
        let connected = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
        let stream = connected.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => self.tls_failed("it closed the connection in the handshake".into()),
            _ => self.failed(in_words(error)),
        })?;
        // A server that negotiates no protocol uses HTTP/1.1.
        if protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(protocol.name()) {
            return Err(self.tls_failed("it does not offer HTTP/2, which gRPC needs".into()));
        }
        Ok(Stream::new(stream))
    }

    fn tls_failed(&self, reason: String) -> ClientError {
        ClientError::Tls { address: self.address.to_string(), reason }
    }
}

async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::other("no address of this name");
    for address in lookup_host((host, port)).await? {
        match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::Error::new(io::ErrorKind::TimedOut, format!("no connection within {} s", CONNECT_MAX.as_secs())),
        }
    }
    Err(last)
}

impl AsyncRead for Stream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.inner).poll_read(context, buffer);
        let is_end = match &polled {
            Poll::Ready(Ok(())) => buffer.filled().len() == before,
            Poll::Ready(Err(error)) => error.kind() == io::ErrorKind::UnexpectedEof,
            Poll::Pending => false,
        };
        match self.unsent.take_if(|_| is_end) {
            Some(error) => self.noted(Poll::Ready(Err(error))),
            None => self.noted(polled),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.written(polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_flush(context);
        self.written(polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.inner).poll_shutdown(context);
        self.noted(polled)
    }
}
