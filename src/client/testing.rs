//! For tests, of the library and of the program: a certificate authority, and servers with TLS. Independent of the library.
#![allow(clippy::unwrap_used)]
// Each of the two uses only a part of it.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{RootCertStore, ServerConfig, ServerConnection, StreamOwned};

/// How long a server waits for its client.
const WITHIN: Duration = Duration::from_secs(30);

/// A certificate and its key, as PEM.
#[derive(Clone)]
pub struct Pair {
    pub certificate: String,
    pub key: String,
}

/// The years in which a certificate is valid.
pub type Years = std::ops::Range<i32>;

/// From the distant past to the distant future.
pub const VALID: Years = 2000..2100;

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pub certificate: String,
}

impl Authority {
    /// An authority with a unique name.
    pub fn new() -> Self {
        static MADE: AtomicU32 = AtomicU32::new(0);
        Self::named(&format!("authority {}", MADE.fetch_add(1, Ordering::Relaxed)))
    }

    pub fn named(name: &str) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate for a server with these names, or for a client.
    pub fn sign(&self, names: &[&str], years: Years) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap();
        (params.not_before, params.not_after) = (date_time_ymd(years.start, 1, 1), date_time_ymd(years.end, 1, 1));
        Pair { certificate: params.signed_by(&key, &self.issuer).unwrap().pem(), key: key.serialize_pem() }
    }

    fn roots(&self) -> Arc<RootCertStore> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap()).unwrap();
        Arc::new(roots)
    }
}

/// A server with this certificate, which requires client certificates signed by `clients`.
pub fn config(pair: &Pair, clients: Option<&Authority>) -> ServerConfig {
    config_of(pair, clients, rustls::ALL_VERSIONS)
}

/// As [`config`], with only these versions of TLS.
pub fn config_of(pair: &Pair, clients: Option<&Authority>, versions: &[&'static rustls::SupportedProtocolVersion]) -> ServerConfig {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider)).with_protocol_versions(versions).unwrap();
    let builder = match clients {
        Some(authority) => {
            builder.with_client_cert_verifier(WebPkiClientVerifier::builder_with_provider(authority.roots(), provider).build().unwrap())
        }
        None => builder.with_no_client_auth(),
    };
    let chain = vec![CertificateDer::from_pem_slice(pair.certificate.as_bytes()).unwrap()];
    builder.with_single_cert(chain, PrivateKeyDer::from_pem_slice(pair.key.as_bytes()).unwrap()).unwrap()
}

/// A received request: its head, and its body according to `Content-Length`.
pub fn read_request(stream: &mut impl Read) -> std::io::Result<(String, Vec<u8>)> {
    let (mut bytes, mut piece) = (Vec::new(), [0; 4096]);
    let mut more = |bytes: &mut Vec<u8>| match stream.read(&mut piece)? {
        0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
        got => {
            bytes.extend_from_slice(&piece[..got]);
            std::io::Result::Ok(())
        }
    };
    let end = loop {
        more(&mut bytes)?;
        if let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let mut body = bytes.split_off(end);
    let head = String::from_utf8(bytes).unwrap();
    let lower = head.to_ascii_lowercase();
    let length = lower.lines().find_map(|line| line.strip_prefix("content-length:")).map_or(0, |length| length.trim().parse().unwrap());
    while body.len() < length {
        more(&mut body)?;
    }
    Ok((head, body))
}

/// Serves on a free port until the test ends; the handler decides what happens on a connection.
pub fn listen(handler: impl Fn(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((stream, _)) = listener.accept() {
            stream.set_read_timeout(Some(WITHIN)).unwrap();
            stream.set_write_timeout(Some(WITHIN)).unwrap();
            handler(stream);
        }
    });
    port
}

/// Serves with TLS on a free port: each connection has one request, which is answered with these bytes, followed by the end of TLS.
pub fn serve(config: ServerConfig, answer: impl Fn(&str, &[u8]) -> Vec<u8> + Send + 'static) -> u16 {
    let config = Arc::new(config);
    listen(move |tcp| {
        let mut stream = StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), tcp);
        // If the client is rejected, or rejects the server, its own error says so.
        let Ok((head, body)) = read_request(&mut stream) else { return };
        let _ = stream.write_all(&answer(&head, &body));
        stream.conn.send_close_notify();
        let _ = stream.flush();
    })
}

/// A response with this body.
pub fn ok(body: &str) -> Vec<u8> {
    format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}
