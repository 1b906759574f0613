//! What became of the files that were looked for.

use std::sync::atomic::{AtomicU64, Ordering};

use super::cache::Cache;

/// Counters, since the start of the process.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Look-ups of files that have no symbols: one per file and naming.
    pub asked: AtomicU64,
    /// Of these, found in the cache.
    pub cached: AtomicU64,
    /// Requests to servers.
    pub requests: AtomicU64,
    /// Of these, answered with the right file.
    pub fetched: AtomicU64,
    /// Of these, answered with 404.
    pub not_known: AtomicU64,
    /// Of these, answered with something else than a debug file of the build id that was asked for.
    pub wrong: AtomicU64,
    /// Of these, answered with a file beyond the limits.
    pub too_large: AtomicU64,
    /// Of these, without an answer, or one that could not be stored.
    pub failed: AtomicU64,
    /// Bytes received.
    pub bytes: AtomicU64,
    /// Look-ups put off to the next naming: the queue was full, or the debug files that were open had all the memory that they may have.
    pub put_off: AtomicU64,
    /// Files that wait or are being fetched now.
    pub waiting: AtomicU64,
}

/// The counters at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counted {
    /// See [`Counters::asked`].
    pub asked: u64,
    /// See [`Counters::cached`].
    pub cached: u64,
    /// See [`Counters::requests`].
    pub requests: u64,
    /// See [`Counters::fetched`].
    pub fetched: u64,
    /// See [`Counters::not_known`].
    pub not_known: u64,
    /// See [`Counters::wrong`].
    pub wrong: u64,
    /// See [`Counters::too_large`].
    pub too_large: u64,
    /// See [`Counters::failed`].
    pub failed: u64,
    /// See [`Counters::bytes`].
    pub bytes: u64,
    /// See [`Counters::put_off`].
    pub put_off: u64,
    /// See [`Counters::waiting`].
    pub waiting: u64,
    /// Files removed from the cache to stay within its limits.
    pub evicted: u64,
    /// Bytes of the cache's files, when one was last added.
    pub cache_bytes: u64,
}

impl Counters {
    /// All of them, with those of the cache.
    pub fn read(&self, cache: &Cache) -> Counted {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counted {
            asked: read(&self.asked),
            cached: read(&self.cached),
            requests: read(&self.requests),
            fetched: read(&self.fetched),
            not_known: read(&self.not_known),
            wrong: read(&self.wrong),
            too_large: read(&self.too_large),
            failed: read(&self.failed),
            bytes: read(&self.bytes),
            put_off: read(&self.put_off),
            waiting: read(&self.waiting),
            evicted: read(&cache.evicted),
            cache_bytes: read(&cache.bytes),
        }
    }
}

/// Adds one.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
