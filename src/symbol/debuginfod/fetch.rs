//! One request to one server: what is asked, how the answer is checked, and what it says about the server.

use std::time::{Duration, Instant};

use super::cache::Cache;
use super::file::{self, Unfit};
use super::settings::parse_url;
use super::{FILE_BYTES_MAX, ServerError};
use crate::client::{Access, ClientError, Server};
use crate::process::elf::BuildId;

/// Longest time for one file: some servers unpack a package first, and 256 MiB take 20 s at 100 Mbit/s.
const TIME_MAX: Duration = Duration::from_secs(120);
/// How long a server that could not be reached, or is overloaded, is left alone.
pub(super) const REST: Duration = Duration::from_secs(60);

/// A server of debug information.
#[derive(Debug)]
pub(super) struct DebugServer {
    server: Server,
    /// Longest time for one file.
    pub time_max: Duration,
    /// Not asked before this.
    rests_until: Option<Instant>,
}

/// The answer to one request.
#[derive(Debug)]
pub(super) enum Answer {
    /// The file, which is in the cache now.
    Fetched,
    /// The server does not have it.
    NotKnown,
    /// It is not the file that was asked for.
    Wrong(String),
    /// It is larger than the limit, or than the cache.
    TooLarge(String),
    /// There is no answer.
    Failed(String),
}

/// A request: its answer, and the bytes received for it, whatever they are.
#[derive(Debug)]
pub(super) struct Asked {
    pub answer: Answer,
    pub bytes: u64,
}

impl DebugServer {
    /// The server at `http://HOST[:PORT][/PREFIX]`, or the same with `https://`.
    pub fn new(url: &str, authorities: Option<Vec<u8>>) -> Result<Self, ServerError> {
        let address = parse_url(url)?;
        let access = Access { authorities, ..Access::default() };
        let server =
            Server::new(address, &access).map_err(|error| ServerError::Access { url: url.to_owned(), reason: error.to_string() })?;
        Ok(Self { server, time_max: TIME_MAX, rests_until: None })
    }

    /// Its address, without the prefix.
    pub fn url(&self) -> String {
        self.server.address().url()
    }

    /// Whether it is left alone at present.
    pub fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }

    /// Fetches a debug file into the cache.
    pub fn ask(&mut self, build_id: &BuildId, cache: &Cache) -> Asked {
        let mut partial = match cache.create(build_id) {
            Ok(partial) => partial,
            Err(error) => return Asked { answer: Answer::Failed(format!("cannot create a file: {error}")), bytes: 0 },
        };
        let bytes_max = FILE_BYTES_MAX.min(cache.bytes_max());
        let fetched = self.server.download(&format!("/buildid/{build_id}/debuginfo"), &mut partial.file, bytes_max, self.time_max);
        let bytes = partial.file.metadata().map_or(0, |meta| meta.len());
        let kept = || -> Result<(), Answer> {
            file::check(partial.file.try_clone().map_err(local)?, build_id, cache.open_bytes_max).map_err(|unfit| match unfit {
                Unfit::TooLarge { .. } => Answer::TooLarge(unfit.to_string()),
                _ => Answer::Wrong(unfit.to_string()),
            })?;
            cache.keep(&partial, build_id).map_err(local)
        };
        let answer = match fetched {
            Ok(_) => kept().map_or_else(|answer| answer, |()| Answer::Fetched),
            Err(ClientError::Status { status: 404, .. }) => Answer::NotKnown,
            Err(error @ ClientError::TooLong { .. }) => Answer::TooLarge(error.to_string()),
            Err(error) => {
                if is_of_server(&error) {
                    self.rests_until = Instant::now().checked_add(REST);
                }
                // A status has no address.
                Answer::Failed(match error {
                    ClientError::Status { .. } => format!("{}: {error}", self.server.address()),
                    error => error.to_string(),
                })
            }
        };
        Asked { answer, bytes }
    }
}

fn local(error: std::io::Error) -> Answer {
    Answer::Failed(format!("cannot keep the file: {error}"))
}

/// Whether an error is one of the server, which other files would have too: it cannot be reached, or has too much to do.
fn is_of_server(error: &ClientError) -> bool {
    match error {
        ClientError::Io { .. } | ClientError::Tls { .. } | ClientError::Protocol { .. } | ClientError::TooSlow { .. } => true,
        ClientError::Status { status, .. } => matches!(status, 429 | 503),
        // The connection ended within the file.
        ClientError::Cut(_) | ClientError::Store { .. } | ClientError::TooLong { .. } | ClientError::Address(_) => false,
    }
}
