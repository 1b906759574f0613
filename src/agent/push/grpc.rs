//! gRPC calls whose message is encoded already. Bounded in time and bytes; h2c alone, as all of this program's HTTP.

use std::str::FromStr as _;
use std::time::Duration;

use prost::bytes::{Buf as _, BufMut as _};
use tokio::runtime::{Builder, Runtime};
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::Sent;
use crate::client::Server;

/// Time for connecting, and for a call.
const CONNECT_MAX: Duration = Duration::from_secs(5);
const CALL_MAX: Duration = Duration::from_secs(40);
/// Bytes of an answer: it is empty, or says how many were refused.
const ANSWER_BYTES_MAX: usize = 64 << 10;

/// A channel that connects with its first call, and anew after it broke.
#[derive(Debug)]
pub struct Grpc {
    runtime: Runtime,
    channel: Channel,
    token: Option<String>,
}

impl Grpc {
    /// For calls to this server.
    ///
    /// # Errors
    /// If the system gives no poll descriptor, or the address is none of HTTP.
    pub fn new(server: &Server) -> std::io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let endpoint = Endpoint::from_shared(server.url()).map_err(std::io::Error::other)?;
        let channel = {
            let _inside = runtime.enter();
            endpoint.connect_timeout(CONNECT_MAX).timeout(CALL_MAX).connect_lazy()
        };
        Ok(Self { runtime, channel, token: server.token().map(str::to_owned) })
    }

    /// Calls a method with a message.
    pub fn send(&self, method: &str, message: &[u8]) -> Sent {
        let Ok(path) = PathAndQuery::from_str(method) else { return Sent::Refused(format!("{method} is no method")) };
        let mut request = Request::new(message.to_vec());
        if let Some(token) = &self.token
            && let Ok(value) = MetadataValue::try_from(format!("Bearer {token}"))
        {
            request.metadata_mut().insert("authorization", value);
        }
        let mut grpc = tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(ANSWER_BYTES_MAX);
        let called = self.runtime.block_on(async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            grpc.unary(request, path, Bytes).await
        });
        match called {
            Ok(_) => Sent::Taken,
            Err(status) if is_final(status.code()) => Sent::Refused(words(&status)),
            Err(status) => Sent::Later(words(&status)),
        }
    }
}

fn words(status: &Status) -> String {
    format!("{}: {}", status.code().description(), status.message())
}

/// Whether the same call would get the same answer later.
fn is_final(code: Code) -> bool {
    use Code::{FailedPrecondition, InvalidArgument, NotFound, OutOfRange, PermissionDenied, Unauthenticated, Unimplemented};
    matches!(code, InvalidArgument | NotFound | OutOfRange | PermissionDenied | Unauthenticated | Unimplemented | FailedPrecondition)
}

/// Bytes as they are; the answer is not looked at.
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
