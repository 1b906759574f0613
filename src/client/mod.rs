//! HTTP requests to an agent, or to a server of profiles: over TCP, TLS or a unix socket, one request a connection, bounded in time and
//! size. hyper reads and writes HTTP/1.1, rustls does TLS.
//!
//! Redirects are not followed: a request may carry a secret, which is for the server that was named. Proxies of the environment
//! (`https_proxy`) are not used.

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
use std::io;
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

/// Time for one request in all.
const TIME_MAX: Duration = Duration::from_secs(40);
/// Time to reach one of a server's addresses.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Bytes of an answer: the list of a thousand processes has about 4 MiB.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// Bytes of an answer's head, and of what is read at a time.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Bytes that are read of an error, and characters that are shown.
const ERROR_BYTES_MAX: usize = 4096;
const ERROR_CHARS_MAX: usize = 300;

/// Why a request failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The address is none that this client can use.
    #[error(
        "{0:?} is not an address: it begins with http:// or https://, then host and port, without a user, or is unix: and the path of a socket"
    )]
    Address(String),
    /// The network.
    #[error("{address}: {source}")]
    Io {
        /// Host and port.
        address: String,
        /// Why.
        source: io::Error,
    },
    /// TLS: the server's certificate, or that it refuses this client.
    #[error("{address}: {reason}")]
    Tls {
        /// Host and port.
        address: String,
        /// Why.
        reason: String,
    },
    /// Not HTTP.
    #[error("{address} does not speak HTTP/1.1: {reason}")]
    Protocol {
        /// Host and port.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// The connection ended before the answer did.
    #[error("{0}: the connection ended before the answer did")]
    Cut(String),
    /// More than is taken.
    #[error("{address}: the answer is longer than {bytes_max} bytes")]
    TooLong {
        /// Host and port.
        address: String,
        /// The limit.
        bytes_max: usize,
    },
    /// No answer in time.
    #[error("{address}: no whole answer within {} s", .time_max.as_secs_f64())]
    TooSlow {
        /// Host and port.
        address: String,
        /// The limit.
        time_max: Duration,
    },
    /// The server's refusal.
    #[error("{status}: {}", sanitize::terminal(.message))]
    Status {
        /// HTTP status.
        status: u16,
        /// What it says, cut.
        message: String,
    },
}

/// Where a server is, and the way into it.
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
    /// What cannot be used of the access. For an `https` address without authorities, if the system has none.
    pub fn new(address: Address, access: &Access) -> Result<Self, AccessError> {
        let access = Prepared::new(access, address.is_tls())?;
        Ok(Self { address, access, time_max: TIME_MAX })
    }

    /// With another limit of the time of a request.
    #[cfg(test)]
    pub(crate) fn with_time_max(self, time_max: Duration) -> Self {
        Self { time_max, ..self }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Time for a request in all.
    pub(crate) fn time_max(&self) -> Duration {
        self.time_max
    }

    /// What each request carries. Values that are secret are marked as sensitive.
    #[must_use]
    pub fn headers(&self) -> &HeaderMap {
        &self.access.headers
    }

    /// What a server said, as it may be shown: without the secrets that it was sent, and cut.
    pub(crate) fn shown(&self, said: &str) -> String {
        self.access.without_secrets(said).chars().take(ERROR_CHARS_MAX).collect()
    }

    /// Asks for a path.
    ///
    /// # Errors
    /// The network's error, or a status other than 2xx.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        self.send(Method::GET, path, None, Bytes::new())
    }

    /// Sends a body.
    ///
    /// # Errors
    /// The network's error, or a status other than 2xx.
    pub fn post(&self, path: &str, kind: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.send(Method::POST, path, Some(kind), Bytes::copy_from_slice(body))
    }

    fn send(&self, method: Method, path: &str, kind: Option<&str>, body: Bytes) -> Result<Vec<u8>, ClientError> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.address.prefix));
        request = request.header(HOST, self.address.host_header()).header(CONNECTION, "close");
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        let mut request = request.body(Full::new(body)).map_err(|error| self.failed(io::Error::other(error)))?;
        request.headers_mut().extend(self.access.headers.clone());
        let runtime = Builder::new_current_thread().enable_all().build().map_err(|error| self.failed(error))?;
        let answer = runtime.block_on(async { timeout(self.time_max, self.exchange(request)).await });
        // A name that is still looked up must not hold up the caller.
        runtime.shutdown_background();
        answer.unwrap_or_else(|_| Err(ClientError::TooSlow { address: self.address.to_string(), time_max: self.time_max }))
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Vec<u8>, ClientError> {
        let stream = TokioIo::new(self.connect(Protocol::Http1).await?);
        let opened = http1::Builder::new().max_buf_size(HEAD_BYTES_MAX).handshake(stream).await;
        let (mut sender, connection) = opened.map_err(|error| self.told(&error))?;
        let driven = tokio::spawn(connection);
        let answer = match sender.send_request(request).await {
            Ok(answer) => answer,
            // The connection knows why it ended.
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
            return self.body(answer.into_body()).await;
        }
        Err(ClientError::Status { status: status.as_u16(), message: self.message(answer).await })
    }

    /// The whole of a body.
    async fn body(&self, mut body: Incoming) -> Result<Vec<u8>, ClientError> {
        let too_long = || ClientError::TooLong { address: self.address.to_string(), bytes_max: ANSWER_BYTES_MAX };
        // What it promises is no reason to reserve anything, but one to give up at once.
        if body.size_hint().lower() > ANSWER_BYTES_MAX as u64 {
            return Err(too_long());
        }
        let mut whole = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(piece) = frame.map_err(|error| self.told(&error))?.into_data() else { continue };
            if whole.len() + piece.len() > ANSWER_BYTES_MAX {
                return Err(too_long());
            }
            whole.extend_from_slice(&piece);
        }
        Ok(whole)
    }

    /// What a refusal says: its start, as far as it arrives.
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

    /// An error on the way.
    fn failed(&self, source: io::Error) -> ClientError {
        let address = self.address.to_string();
        match source.get_ref().and_then(|inner| inner.downcast_ref::<TlsFault>()) {
            Some(fault) => ClientError::Tls { address, reason: fault.to_string() },
            None => ClientError::Io { address, source },
        }
    }

    /// What went wrong in an exchange.
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
            // What hyper says of chunks and lengths.
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => ClientError::Protocol { address, reason: cause.to_string() },
            kind => ClientError::Io { address, source: io::Error::new(kind, cause.to_string()) },
        }
    }
}

/// The system's or TLS's error behind one of hyper's.
fn cause(error: &hyper::Error) -> Option<&io::Error> {
    std::iter::successors(error.source(), |&error| error.source()).find_map(|error| error.downcast_ref::<io::Error>())
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}
