//! Debug information of files without symbols, from debuginfod servers (elfutils, debuginfod(8)): `GET URL/buildid/HEX/debuginfo`.
//!
//! ```text
//! symbolizer ─ find ─→ cache ── there ─→ path of the debug file
//!                        └ not there ─→ queue ─→ thread ─ fetch ─→ servers in order ─→ file, checked ─→ cache
//! ```
//!
//! Off unless servers are configured, because a request tells its server the build id of a program that runs here. A symbolizer never waits for
//! a server, unless its process is a command with [`Patience`]: it names what it can, and the next naming has the rest. Only a file with the
//! build id that was asked for is used; with a hostile server the worst case is no names, wrong names from a file of that build id, and as
//! much memory as [`Settings::open_bytes_max`] allows.
//!
//! A process has at most one [`Debuginfod`], [installed](install) by whoever composes it: all recordings share its cache and its thread.

mod cache;
mod counters;
mod fetch;
mod file;
mod queue;
mod settings;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use thiserror::Error;

use self::cache::Cache;
pub use self::cache::CacheError;
pub use self::counters::Counted;
use self::counters::count;
use self::fetch::DebugServer;
use self::queue::Shared;
pub use self::settings::{CACHE_DIRECTORY_DEFAULT, CACHE_MIB_DEFAULT, OPEN_MIB_DEFAULT, URLS_VARIABLE, check_url, user_cache, words};
use super::Separate;

/// Largest debug file that is fetched. Of Debian 12's packages only those of browsers, compilers and large databases have larger ones.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Limit of a command's debug files that are open at a time, with their sections decompressed; see [`Settings::open_bytes_max`].
pub const OPEN_BYTES_DEFAULT: u64 = 1 << 30;
/// Most servers; further ones are not asked.
pub const SERVERS_MAX: usize = 8;

/// Why a server is not used.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
pub enum ServerError {
    /// Not an address.
    #[error("{0}")]
    Address(String),
    /// A unix socket.
    #[error("{0:?}: a server of debug information has an address that begins with http:// or https://")]
    Local(String),
    /// No authority can be trusted.
    #[error("{url}: {reason}")]
    Access {
        /// The server.
        url: String,
        /// The reason.
        reason: String,
    },
}

/// Why nothing can be fetched.
#[derive(Debug, Error)]
pub enum SetupError {
    /// A server is not usable.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The directory is not usable.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Servers and cache.
#[derive(Debug, Default)]
pub struct Settings {
    /// Addresses of the servers, in the order in which they are asked.
    pub urls: Vec<String>,
    /// Certificates of the only trusted authorities, as PEM; `None` = those of the system.
    pub authorities: Option<Vec<u8>>,
    /// Directory of the cache.
    pub cache_directory: PathBuf,
    /// Its limit. One file more may be there while it is fetched.
    pub cache_bytes_max: u64,
    /// Limit of the debug files that are open at a time, with their sections decompressed. The reader takes up to 1.5 times as much memory
    /// (measured: 116 MB for 82 MB of compressed sections, 39 MB for the same not compressed).
    pub open_bytes_max: u64,
    /// For a command; `None` = nobody waits.
    pub patience: Option<Patience>,
}

/// How long a command waits for files, and how it says so.
#[derive(Debug, Clone)]
pub struct Patience {
    /// Longest wait, for all files together.
    pub time_max: Duration,
    /// Set while it waits; clearing it ends this wait and all later ones.
    pub waits: Arc<AtomicBool>,
    /// Told before a wait what it is for.
    pub say: fn(&str),
}

/// What is known of a debug file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Lookup {
    /// This path opens it.
    Found(PathBuf),
    /// It is being fetched.
    NotYet,
    /// No server has it, or none can be asked; it is asked for again from then on.
    NotUntil(Instant),
}

/// Fetches debug files. Shared by all threads; its own thread ends with it.
#[derive(Debug)]
pub struct Debuginfod(Arc<Shared>);

static INSTALLED: OnceLock<Arc<Debuginfod>> = OnceLock::new();

/// Lets every symbolizer of this process look for debug information. Only the first call counts.
pub fn install(debuginfod: Arc<Debuginfod>) {
    // A process has one composition.
    drop(INSTALLED.set(debuginfod));
}

/// The one of this process, if it was configured.
pub fn installed() -> Option<Arc<Debuginfod>> {
    INSTALLED.get().cloned()
}

impl Debuginfod {
    /// Opens the cache. The thread starts with the first file that is not in it.
    ///
    /// # Errors
    /// If a server's address cannot be used, or the directory.
    pub fn new(settings: Settings) -> Result<Self, SetupError> {
        let Settings { urls, authorities, cache_directory, cache_bytes_max, open_bytes_max, patience } = settings;
        let servers: Result<Vec<_>, _> = urls.iter().take(SERVERS_MAX).map(|url| DebugServer::new(url, authorities.clone())).collect();
        let cache = Cache::open(&cache_directory, cache_bytes_max, open_bytes_max)?;
        Ok(Self(Arc::new(Shared::new(servers?, cache, patience))))
    }

    /// The debug file of a file without symbols. If it is not in the cache it is fetched by the thread; a command with [`Patience`] waits.
    pub fn find(&self, wanted: &Separate) -> Lookup {
        let counters = &self.0.counters;
        count(&counters.asked);
        if let Some(path) = self.0.cache.find(&wanted.build_id) {
            count(&counters.cached);
            return Lookup::Found(path);
        }
        Shared::fetched(&self.0, wanted)
    }

    /// See [`Settings::open_bytes_max`].
    pub(super) fn open_bytes_max(&self) -> u64 {
        self.0.cache.open_bytes_max
    }

    /// Counts a file that is there, but must wait for the next naming.
    pub(super) fn put_off(&self) {
        count(&self.0.counters.put_off);
    }

    /// The counters.
    #[must_use]
    pub fn counted(&self) -> Counted {
        self.0.counters.read(&self.0.cache)
    }

    /// Fetches nothing from now on, and removes the file that is being fetched, because the process ends.
    pub fn abandon(&self) {
        self.0.close();
        self.0.cache.abandon();
    }
}

impl Drop for Debuginfod {
    fn drop(&mut self) {
        self.0.close();
    }
}
