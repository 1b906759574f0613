//! A request to a container runtime over its unix socket, for the list of pods and containers. Limited in time and bytes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

use super::messages::{
    ListContainersRequest, ListContainersResponse, ListImagesRequest, ListImagesResponse, ListPodSandboxRequest, ListPodSandboxResponse,
    VersionRequest, VersionResponse,
};
use super::names::{Directory, lacks_image_name};

/// Timeout of connecting and of each answer. A runtime answers within about 10 ms; a kubelet waits for 2 minutes, which is too long here.
const WITHIN: Duration = Duration::from_secs(3);
/// Most bytes of an answer: a container takes about 2 KiB with its labels and annotations, so 8000 of them. A kubelet has the same limit.
const ANSWER_BYTES_MAX: usize = 16 << 20;

/// Why a runtime gave no names.
#[derive(Debug, Error)]
pub enum CriError {
    /// The path cannot be a socket's.
    #[error("{path} cannot be a socket's path")]
    Path {
        /// The path.
        path: PathBuf,
    },
    /// No connection.
    #[error("cannot connect to {path}: {source}")]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: tonic::transport::Error,
    },
    /// Its answer was an error, invalid, too late, or too large.
    #[error("{path} gave no answer to {method}: {}", .status.message())]
    Answer {
        /// The socket.
        path: PathBuf,
        /// The method.
        method: &'static str,
        /// Why.
        status: Box<tonic::Status>,
    },
}

/// A connection to a runtime.
#[derive(Debug)]
pub struct Client {
    path: PathBuf,
    grpc: Grpc<Channel>,
}

impl Client {
    /// Connects. Call it within a runtime.
    ///
    /// # Errors
    /// If there is no socket at the path, or the connection is not accepted in time.
    pub async fn connect(path: &Path) -> Result<Self, CriError> {
        let text = path.to_str().filter(|text| text.starts_with('/')).ok_or_else(|| CriError::Path { path: path.to_owned() })?;
        let connect = |source| CriError::Connect { path: path.to_owned(), source };
        let endpoint = Endpoint::from_shared(format!("unix://{text}")).map_err(connect)?.connect_timeout(WITHIN).timeout(WITHIN);
        let channel = endpoint.connect().await.map_err(connect)?;
        Ok(Self { path: path.to_owned(), grpc: Grpc::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX) })
    }

    /// Requests all lists.
    ///
    /// # Errors
    /// If an answer is an error, invalid, too late or too large.
    pub async fn directory(&mut self) -> Result<Directory, CriError> {
        let pods: ListPodSandboxResponse = self.call("/runtime.v1.RuntimeService/ListPodSandbox", ListPodSandboxRequest {}).await?;
        let containers: ListContainersResponse = self.call("/runtime.v1.RuntimeService/ListContainers", ListContainersRequest {}).await?;
        // Without these, names can still be shown.
        let version: VersionResponse = self.call("/runtime.v1.RuntimeService/Version", VersionRequest {}).await.unwrap_or_default();
        let images: ListImagesResponse = if containers.containers.iter().any(lacks_image_name) {
            self.call("/runtime.v1.ImageService/ListImages", ListImagesRequest {}).await.unwrap_or_default()
        } else {
            ListImagesResponse::default()
        };
        Ok(Directory::new(pods, containers, &images, &version.runtime_name))
    }

    /// Calls a unary method. The agent itself only requests lists; the tests create pods.
    ///
    /// # Errors
    /// If the answer is an error, invalid, too late or too large.
    pub async fn call<Question, Answer>(&mut self, method: &'static str, question: Question) -> Result<Answer, CriError>
    where
        Question: prost::Message + 'static,
        Answer: prost::Message + Default + 'static,
    {
        self.call_in(None, method, question).await
    }

    /// As [`Self::call`], of a service of containerd's own, whose data are apart for each namespace.
    ///
    /// # Errors
    /// If the answer is an error, invalid, too late or too large.
    pub async fn call_in<Question, Answer>(
        &mut self,
        namespace: Option<&'static str>,
        method: &'static str,
        question: Question,
    ) -> Result<Answer, CriError>
    where
        Question: prost::Message + 'static,
        Answer: prost::Message + Default + 'static,
    {
        let path = self.path.clone();
        let failed = |status| CriError::Answer { path, method, status: Box::new(status) };
        let ready = self.grpc.ready().await;
        if let Err(error) = ready {
            return Err(failed(tonic::Status::unavailable(error.to_string())));
        }
        let codec: ProstCodec<Question, Answer> = ProstCodec::default();
        let mut request = tonic::Request::new(question);
        if let Some(namespace) = namespace {
            request.metadata_mut().insert("containerd-namespace", tonic::metadata::MetadataValue::from_static(namespace));
        }
        let answer = self.grpc.unary(request, PathAndQuery::from_static(method), codec).await;
        answer.map(tonic::Response::into_inner).map_err(failed)
    }
}
