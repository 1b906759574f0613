//! A small HTTP/1.1 client for loopback and cluster services, over TCP or a unix socket: one request a connection, bounded in time and
//! size. Plain HTTP only: where TLS is needed, a local proxy speaks it.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use thiserror::Error;

/// Time for one request in all.
const TIME_MAX: Duration = Duration::from_secs(40);
/// Time to reach the server.
const CONNECT_MAX: Duration = Duration::from_secs(5);
/// Bytes of an answer: the list of a thousand processes has about 4 MiB.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Why a request failed.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The address is none that this client can use.
    #[error(
        "{0:?} is not an address: it begins with http:// (https needs a proxy), then host and port, or is unix: and the path of a socket"
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
    /// Not HTTP.
    #[error("{0} does not speak HTTP/1.1")]
    Protocol(String),
    /// The server's refusal.
    #[error("{status}: {message}")]
    Status {
        /// HTTP status.
        status: u16,
        /// What it says, cut.
        message: String,
    },
}

/// Start of the address of a unix socket.
const UNIX: &str = "unix:";

/// Where a server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Host and port, or `unix:` and a path.
    address: String,
    prefix: String,
    token: Option<String>,
}

impl Server {
    /// From `http://HOST:PORT[/PREFIX]` or `unix:PATH`.
    ///
    /// # Errors
    /// If it is no such address.
    pub fn parse(url: &str) -> Result<Self, ClientError> {
        let wrong = || ClientError::Address(url.to_owned());
        if url.strip_prefix(UNIX).is_some_and(|path| path.starts_with('/')) {
            return Ok(Self { address: url.to_owned(), prefix: String::new(), token: None });
        }
        let rest = url.strip_prefix("http://").ok_or_else(wrong)?;
        let (address, prefix) = rest.split_once('/').map_or((rest, String::new()), |(address, path)| (address, format!("/{path}")));
        let is_clean = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if address.is_empty() || !is_clean(address) || !is_clean(&prefix) || address.contains('@') {
            return Err(wrong());
        }
        let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let address = if has_port { address.to_owned() } else { format!("{address}:80") };
        Ok(Self { address, prefix: prefix.trim_end_matches('/').to_owned(), token: None })
    }

    /// With a bearer token.
    #[must_use]
    pub fn with_token(mut self, token: Option<String>) -> Self {
        self.token = token;
        self
    }

    /// The bearer token, if there is one.
    #[must_use]
    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    /// Host and port, or `unix:` and a path.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The address as it was given, without the prefix.
    #[must_use]
    pub fn url(&self) -> String {
        if self.address.starts_with(UNIX) { self.address.clone() } else { format!("http://{}", self.address) }
    }

    /// Asks for a path.
    ///
    /// # Errors
    /// The network's error, or a status other than 2xx.
    pub fn get(&self, path: &str) -> Result<Vec<u8>, ClientError> {
        self.send("GET", path, "", &[])
    }

    /// Sends a body.
    ///
    /// # Errors
    /// The network's error, or a status other than 2xx.
    pub fn post(&self, path: &str, kind: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        self.send("POST", path, kind, body)
    }

    fn send(&self, method: &str, path: &str, kind: &str, body: &[u8]) -> Result<Vec<u8>, ClientError> {
        let fail = |source| ClientError::Io { address: self.address.clone(), source };
        let host = if self.address.starts_with(UNIX) { "localhost" } else { &self.address };
        let mut head = format!("{method} {}{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n", self.prefix);
        if let Some(token) = &self.token {
            head.push_str(&format!("Authorization: Bearer {token}\r\n"));
        }
        if method == "POST" {
            head.push_str(&format!("Content-Type: {kind}\r\nContent-Length: {}\r\n", body.len()));
        }
        head.push_str("\r\n");
        let deadline = Instant::now() + TIME_MAX;
        let mut stream = self.connect().map_err(fail)?;
        stream.limit_writes(TIME_MAX).map_err(fail)?;
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body)).map_err(fail)?;
        let mut answer = Vec::new();
        let mut piece = vec![0; 64 << 10];
        loop {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            stream.limit_reads(left).map_err(fail)?;
            let got = stream.read(&mut piece).map_err(fail)?;
            if got == 0 {
                break;
            }
            answer.extend_from_slice(piece.get(..got).unwrap_or_default());
            if answer.len() as u64 > ANSWER_BYTES_MAX || Instant::now() >= deadline {
                return Err(fail(io::Error::other("the answer is too long, or too slow")));
            }
        }
        let (status, body) = parse(&answer).ok_or_else(|| ClientError::Protocol(self.address.clone()))?;
        if (200..300).contains(&status) {
            return Ok(body);
        }
        let message = String::from_utf8_lossy(body.get(..body.len().min(300)).unwrap_or_default()).into_owned();
        Err(ClientError::Status { status, message })
    }

    fn connect(&self) -> io::Result<Box<dyn Connection>> {
        if let Some(path) = self.address.strip_prefix(UNIX) {
            return Ok(Box::new(UnixStream::connect(path)?));
        }
        let mut last = io::Error::other("no address of this name");
        for address in self.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_MAX) {
                Ok(stream) => return Ok(Box::new(stream)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// A stream whose waits have limits.
trait Connection: Read + Write {
    fn limit_reads(&self, most: Duration) -> io::Result<()>;
    fn limit_writes(&self, most: Duration) -> io::Result<()>;
}

impl Connection for TcpStream {
    fn limit_reads(&self, most: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(most))
    }

    fn limit_writes(&self, most: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(most))
    }
}

impl Connection for UnixStream {
    fn limit_reads(&self, most: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(most))
    }

    fn limit_writes(&self, most: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(most))
    }
}

/// Status and body of an answer that ends with its connection (RFC 9112).
fn parse(answer: &[u8]) -> Option<(u16, Vec<u8>)> {
    let at = answer.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(answer.get(..at)?).ok()?;
    let body = answer.get(at + 4..)?;
    let mut lines = head.split("\r\n");
    let status = lines.next()?.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()?;
    let header = |name: &str| {
        let mut lines = head.split("\r\n").skip(1);
        lines.find_map(|line| line.split_once(':').filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()))
    };
    if header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
        return Some((status, unchunked(body)?));
    }
    match header("content-length").map(str::parse::<usize>) {
        Some(Ok(length)) => Some((status, body.get(..length)?.to_vec())),
        Some(Err(_)) => None,
        None => Some((status, body.to_vec())),
    }
}

fn unchunked(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    loop {
        let at = body.windows(2).position(|window| window == b"\r\n")?;
        let size = std::str::from_utf8(body.get(..at)?).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok()?;
        body = body.get(at + 2..)?;
        if size == 0 {
            return Some(whole);
        }
        whole.extend_from_slice(body.get(..size)?);
        body = body.get(size.checked_add(2)?..)?;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn answers_are_read_with_a_length_in_chunks_and_to_the_end() {
        assert_eq!(parse(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc").unwrap(), (200, b"ab".to_vec()));
        assert_eq!(
            parse(b"HTTP/1.1 201 x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n1;x=y\r\nd\r\n0\r\n\r\n").unwrap(),
            (201, b"abcd".to_vec())
        );
        assert_eq!(parse(b"HTTP/1.0 404 no\r\n\r\nrest").unwrap(), (404, b"rest".to_vec()));
    }

    #[test]
    fn addresses_are_checked() {
        let server = Server::parse("http://h:1/x/").unwrap();
        assert_eq!((server.address.as_str(), server.prefix.as_str()), ("h:1", "/x"));
        assert_eq!(Server::parse("http://h").unwrap().address, "h:80");
        assert_eq!(Server::parse("unix:/run/x y.sock").unwrap().url(), "unix:/run/x y.sock");
        for wrong in ["https://h", "unix:", "unix:relative", "h:1", "http://", "http://a b", "http://u@h", "http://h/\r\nX: y"] {
            assert!(Server::parse(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text in "(HTTP/1\\.[01] [0-9]{0,4} |\r\n|[a-f0-9;:]|Transfer-Encoding: chunked|Content-Length: ){0,20}") {
            let _ = parse(&bytes);
            let _ = parse(text.as_bytes());
            let _ = unchunked(text.as_bytes());
        }
    }
}
