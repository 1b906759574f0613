//! HTTP requests to an agent, or to a server of profiles: over TCP, TLS or a unix socket, one request per connection, with limits on time
//! and size. hyper implements HTTP/1.1, rustls implements TLS.
//!
//! Redirects are not followed: a request may carry a secret that only the named server may see. Proxies from the environment
//! (`https_proxy`) are not used.
//!
//! Responses are held in memory, except for a [download](Server::download), which is written piece by piece.

mod access;
mod address;
mod connect;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod tls;

use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use http::header::{CONNECTION, CONTENT_TYPE, HOST, LOCATION};
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::runtime::Builder;
use tokio::time::timeout;

use self::access::Prepared;
pub use self::access::{Access, AccessError, Credentials, Identity};
pub use self::address::Address;
pub(crate) use self::connect::{Fault, Protocol, Stream};
use self::tls::TlsFault;
use crate::sanitize;

/// Maximum time for a whole request.
const TIME_MAX: Duration = Duration::from_secs(40);
/// Maximum time to connect to one of a server's addresses.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Maximum size of a response that is held in memory: the list of a thousand processes has about 4 MiB.
const ANSWER_BYTES_MAX: u64 = 64 << 20;
/// Maximum size of a response's head, and of a single read.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Maximum number of bytes read of an error, and of characters shown.
const ERROR_BYTES_MAX: usize = 4096;
const ERROR_CHARS_MAX: usize = 300;

/// Why a request failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// This client does not support the address.
    #[error(
        "{0:?} is not an address: it begins with http:// or https://, then host and port, without a user, or is unix: and the path of a socket"
    )]
    Address(String),
    /// A network error.
    #[error("{address}: {source}")]
    Io {
        /// Host and port.
        address: String,
        /// The reason.
        source: io::Error,
    },
    /// A TLS error: the server's certificate is invalid, or the server rejects this client.
    #[error("{address}: {reason}")]
    Tls {
        /// Host and port.
        address: String,
        /// The reason.
        reason: String,
    },
    /// The server does not speak HTTP.
    #[error("{address} does not speak HTTP/1.1: {reason}")]
    Protocol {
        /// Host and port.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// The connection ended before the response was complete.
    #[error("{0}: the connection ended before the response was complete")]
    Cut(String),
    /// The response is too large.
    #[error("{address}: the response is longer than {bytes_max} bytes")]
    TooLong {
        /// Host and port.
        address: String,
        /// The limit.
        bytes_max: u64,
    },
    /// The response cannot be stored here, which is not the server's fault.
    #[error("{address}: cannot store the response: {source}")]
    Store {
        /// Host and port.
        address: String,
        /// The reason.
        source: io::Error,
    },
    /// No complete response in time.
    #[error("{address}: no complete response within {} s", .time_max.as_secs_f64())]
    TooSlow {
        /// Host and port.
        address: String,
        /// The limit.
        time_max: Duration,
    },
    /// The server rejected the request.
    #[error("{status}: {}", sanitize::terminal(.message))]
    Status {
        /// HTTP status.
        status: u16,
        /// Its message, truncated.
        message: String,
    },
}

/// A server with its address and credentials.
#[derive(Clone)]
pub struct Server {
    address: Address,
    access: Prepared,
    time_max: Duration,
}

impl Server {
    /// A server.
    ///
    /// # Errors
    /// If a part of the access cannot be used; for an `https` address without authorities, if the system has no root certificates.
    pub fn new(address: Address, access: &Access) -> Result<Self, AccessError> {
        let access = Prepared::new(access, address.is_tls())?;
        Ok(Self { address, access, time_max: TIME_MAX })
    }

    /// The same with another time limit for requests.
    #[cfg(test)]
    pub(crate) fn with_time_max(self, time_max: Duration) -> Self {
        Self { time_max, ..self }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Maximum time for a whole request.
    pub(crate) fn time_max(&self) -> Duration {
        self.time_max
    }

    /// The headers of each request. Secret values are marked as sensitive.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.access.headers
    }

    /// A server's message for display: truncated, and without the secrets that it was sent.
    pub(crate) fn shown(&self, said: &str) -> String {
        self.access.without_secrets(said).chars().take(ERROR_CHARS_MAX).collect()
    }

    /// Requests a path.
    ///
    /// # Errors
    /// Network errors, and statuses other than 2xx.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        self.send(Method::GET, path, None, Bytes::new())
    }

    /// Requests a path and writes the response to `out` as it arrives. Returns its length in bytes. After an error `out` has a part of it.
    ///
    /// # Errors
    /// Network errors, statuses other than 2xx, a response of more than `bytes_max` bytes or that is not complete after `time_max`, and the
    /// errors of `out`.
    pub fn download(&self, path: &str, out: &mut dyn Write, bytes_max: u64, time_max: Duration) -> Result<u64, ClientError> {
        let request = self.request(Method::GET, path, None, Bytes::new())?;
        self.run(request, &mut Sink { out, bytes_max, bytes: 0 }, time_max)
    }

    /// Sends a body.
    ///
    /// # Errors
    /// Network errors, and statuses other than 2xx.
    pub fn post(&self, path: &str, kind: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.send(Method::POST, path, Some(kind), Bytes::copy_from_slice(body))
    }

    fn send(&self, method: Method, path: &str, kind: Option<&str>, body: Bytes) -> Result<Vec<u8>, ClientError> {
        let request = self.request(method, path, kind, body)?;
        let mut whole = Vec::new();
        self.run(request, &mut Sink { out: &mut whole, bytes_max: ANSWER_BYTES_MAX, bytes: 0 }, self.time_max)?;
        Ok(whole)
    }

    fn request(&self, method: Method, path: &str, kind: Option<&str>, body: Bytes) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.address.prefix));
        request = request.header(HOST, self.address.host_header()).header(CONNECTION, "close");
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        let mut request = request.body(Full::new(body)).map_err(|error| self.failed(io::Error::other(error)))?;
        request.headers_mut().extend(self.access.headers.clone());
        Ok(request)
    }

    /// Sends a request and fills the sink with its response. Returns the response's length.
    fn run(&self, request: Request<Full<Bytes>>, sink: &mut Sink<'_>, time_max: Duration) -> Result<u64, ClientError> {
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| self.failed(error))?;
        let answer = runtime.block_on(async { timeout(time_max, self.exchange(request, sink)).await });
        // A name lookup in progress must not delay the caller.
        runtime.shutdown_background();
        answer.unwrap_or_else(|_| Err(ClientError::TooSlow { address: self.address.to_string(), time_max }))?;
        Ok(sink.bytes)
    }

    async fn exchange(&self, request: Request<Full<Bytes>>, sink: &mut Sink<'_>) -> Result<(), ClientError> {
        let stream = TokioIo::new(self.connect(Protocol::Http1).await?);
        let opened = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).handshake(stream).await;
        let (mut sender, connection) = opened.map_err(|error| self.told(&error))?;
        let driven = tokio::spawn(connection);
        let answer = match sender.send_request(request).await {
            Ok(answer) => answer,
            // The connection has the reason why it ended.
            Err(error) if error.is_canceled() || error.is_closed() => {
                return Err(match driven.await {
                    Ok(Err(cause)) => self.told(&cause),
                    // Or the error does, of a server that speaks before it is asked. Without a reason it only ended too early.
                    _ => match error.source().and_then(|cause| cause.downcast_ref::<hyper::Error>()) {
                        Some(cause) => self.told(cause),
                        None => ClientError::Cut(self.address.to_string()),
                    },
                });
            }
            Err(error) => return Err(self.told(&error)),
        };
        let status = answer.status();
        if status.is_success() {
            return self.body(answer.into_body(), sink).await;
        }
        Err(ClientError::Status { status: status.as_u16(), message: self.message(answer).await })
    }

    /// Fills the sink with the complete body.
    async fn body(&self, mut body: Incoming, sink: &mut Sink<'_>) -> Result<(), ClientError> {
        let bytes_max = sink.bytes_max;
        let too_long = || ClientError::TooLong { address: self.address.to_string(), bytes_max };
        // The announced length does not reserve memory, but a length above the limit is an immediate error.
        if body.size_hint().lower() > bytes_max {
            return Err(too_long());
        }
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|error| self.told(&error))?.into_data() else { continue };
            if piece.len() as u64 > bytes_max.saturating_sub(sink.bytes) {
                return Err(too_long());
            }
            sink.out.write_all(&piece).map_err(|source| ClientError::Store { address: self.address.to_string(), source })?;
            sink.bytes += piece.len() as u64;
        }
        Ok(())
    }

    /// The message of a rejection: its beginning, as far as it arrives.
    async fn message(&self, answer: Response<Incoming>) -> String {
        let location = answer.headers().get(LOCATION).map(|place| String::from_utf8_lossy(place.as_bytes()).into_owned());
        if let Some(location) = location.filter(|_| answer.status().is_redirection()) {
            return self.shown(&format!("it redirects to {location}, which is not followed: name that address if it is the right one"));
        }
        let mut said = Vec::new();
        let mut body = answer.into_body();
        while said.len() < ERROR_BYTES_MAX
            && let Some(Ok(frame)) = body.frame().await
        {
            said.extend_from_slice(frame.data_ref().map(|piece| piece.as_ref()).unwrap_or_default());
        }
        said.truncate(ERROR_BYTES_MAX);
        self.shown(&String::from_utf8_lossy(&said))
    }

    /// A network error.
    fn failed(&self, source: io::Error) -> ClientError {
        let address = self.address.to_string();
        match source.get_ref().and_then(|inner| inner.downcast_ref::<TlsFault>()) {
            Some(fault) => ClientError::Tls { address, reason: fault.to_string() },
            None => ClientError::Io { address, source },
        }
    }

    /// An error of an HTTP exchange.
    fn told(&self, error: &hyper::Error) -> ClientError {
        let address = self.address.to_string();
        if error.is_incomplete_message() {
            return ClientError::Cut(address);
        }
        let Some(cause) = cause(error) else { return ClientError::Protocol { address, reason: error.to_string() } };
        if let Some(fault) = cause.get_ref().and_then(|inner| inner.downcast_ref::<TlsFault>()) {
            return ClientError::Tls { address, reason: fault.to_string() };
        }
        match cause.kind() {
            io::ErrorKind::UnexpectedEof => ClientError::Cut(address),
            // hyper's errors about chunks and lengths.
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => ClientError::Protocol { address, reason: cause.to_string() },
            kind => ClientError::Io { address, source: io::Error::new(kind, cause.to_string()) },
        }
    }
}

/// Where a response's body is written.
struct Sink<'a> {
    out: &'a mut dyn Write,
    bytes_max: u64,
    /// Written so far.
    bytes: u64,
}

/// The operating system's or TLS's error that caused one of hyper's.
fn cause(error: &hyper::Error) -> Option<&io::Error> {
    std::iter::successors(error.source(), |&error| error.source()).find_map(|error| error.downcast_ref::<io::Error>())
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}
