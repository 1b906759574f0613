//! gRPC calls with an already encoded message. Limited in time and bytes. Connections are the client's own ([`crate::client`]), so that
//! TLS, its errors and unix sockets work as for every other request.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::str::FromStr as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;

use prost::bytes::{Buf as _, BufMut as _};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::Service;
use tonic::codegen::http::Uri;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataMap;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::Sent;
use crate::client::{ClientError, Fault, Protocol, Server, Stream};
use crate::sanitize;

/// Maximum size of a response: it is empty, or says how many profiles were rejected.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A channel that connects with its first call, and again after it broke.
#[derive(Debug)]
pub struct Grpc {
    runtime: Runtime,
    channel: Channel,
    server: Server,
    fault: LastFault,
}

impl Grpc {
    /// For calls to this server.
    ///
    /// # Errors
    /// If no poll descriptor can be created, or the address is not valid for HTTP.
    pub fn new(server: &Server) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let fault = LastFault::default();
        let channel = channel(&runtime, server, &fault)?;
        Ok(Self { runtime, channel, server: server.clone(), fault })
    }

    /// Uses this server from now on, with a new connection.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn switch(&mut self, server: &Server) -> io::Result<()> {
        self.channel = channel(&self.runtime, server, &self.fault)?;
        self.server = server.clone();
        Ok(())
    }

    /// Calls a method with a message.
    pub fn send(&mut self, method: &str, message: &[u8]) -> Sent {
        let Ok(path) = PathAndQuery::from_str(method) else { return Sent::Refused(format!("{method} is not a valid method")) };
        let mut request = Request::new(message.to_vec());
        *request.metadata_mut() = MetadataMap::from_headers(self.server.headers().clone());
        let mut grpc = tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let call = async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            grpc.unary(request, path, Bytes).await
        };
        // Includes the time for the connection that it may need.
        match self.runtime.block_on(async { timeout(self.server.time_max(), call).await }) {
            Ok(Ok(_)) => Sent::Taken,
            Ok(Err(status)) if is_final(status.code()) => Sent::Refused(self.words(&status)),
            Ok(Err(status)) => Sent::Later(self.words(&status)),
            Err(_) => {
                let late = ClientError::TooSlow { address: self.server.address().to_string(), time_max: self.server.time_max() };
                // The connection may have no reader any more.
                let renewed = channel(&self.runtime, &self.server, &self.fault).map(|channel| self.channel = channel);
                Sent::Later(renewed.err().map_or_else(|| late.to_string(), |error| error.to_string()))
            }
        }
    }

    /// The text of a status, and its cause if it was created on this side: for a connection that failed, tonic only says that it was
    /// closed.
    fn words(&self, status: &Status) -> String {
        let text = format!("{}: {}", status.code().description(), status.message());
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let text = match fault.as_ref().and_then(|fault| fault.get()) {
            Some(fault) if !text.contains(fault) => format!("{text}: {}: {fault}", self.server.address()),
            _ => text,
        };
        sanitize::terminal(&self.server.shown(&text)).into_owned()
    }
}

/// The first error of the newest connection.
type LastFault = Arc<Mutex<Option<Fault>>>;

fn channel(runtime: &Runtime, server: &Server, fault: &LastFault) -> io::Result<Channel> {
    let origin = Uri::from_str(&server.address().origin()).map_err(io::Error::other)?;
    // The origin names the server of requests. The connector needs no URI, and with http:// tonic adds no TLS to the connector's.
    let endpoint = Endpoint::from_static("http://server").origin(origin);
    let _inside = runtime.enter();
    Ok(endpoint.connect_with_connector_lazy(Connector { server: server.clone(), fault: Arc::clone(fault) }))
}

/// Connects to a server in the same way as its other requests.
#[derive(Debug, Clone)]
struct Connector {
    server: Server,
    fault: LastFault,
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = ClientError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let Self { server, fault } = self.clone();
        Box::pin(async move {
            let connected = server.connect(Protocol::Http2).await;
            *fault.lock().unwrap_or_else(PoisonError::into_inner) = connected.as_ref().ok().map(Stream::fault);
            connected.map(TokioIo::new)
        })
    }
}

/// Whether repeating the call later would give the same result.
fn is_final(code: Code) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, NotFound, OutOfRange, PermissionDenied, Unauthenticated, Unimplemented};
    matches!(code, InvalidArgument | NotFound | OutOfRange | PermissionDenied | Unauthenticated | Unimplemented | FailedPrecondition)
}

/// Raw bytes; the response is not decoded.
#[derive(Debug, Clone, Copy)]
struct Bytes;

impl Codec for Bytes {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Bytes {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Bytes {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        from.advance(from.remaining());
        Ok(Some(()))
    }
}
