//! The profiles that wait to be sent, the oldest first: bounded, and on disk once one could not be sent at once.

use std::collections::VecDeque;
use std::path::Path;

use super::Source;
use super::interval::Receipt;
use super::spool::Spool;

/// Maximum number of queued profiles; about ten KiB each. The oldest is dropped first.
pub(super) const QUEUE_MAX: usize = 4096;
/// Maximum size of queued profiles, in bytes.
pub(super) const QUEUE_BYTES_MAX: usize = 32 << 20;

/// One profile to be sent.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Parcel {
    pub path: String,
    pub body: Vec<u8>,
    /// Whose account it was taken from; `None` = of an earlier run of the agent.
    pub source: Option<Source>,
    /// What it took from its account.
    pub receipt: Receipt,
    /// Number of its file, if it is on disk.
    pub file: Option<u64>,
}

impl Parcel {
    fn bytes(&self) -> usize {
        self.path.len() + self.body.len() + self.receipt.bytes()
    }
}

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Queue {
    parcels: VecDeque<Parcel>,
    bytes: usize,
    spool: Option<Spool>,
    /// Whether a failed write was logged.
    told: bool,
}

impl Queue {
    /// With the profiles that an earlier run left in this directory. Returns also how many of them were lost.
    pub fn open(directory: Option<&Path>, protocol: &'static str) -> (Self, u64) {
        let Some(directory) = directory else { return (Self::default(), 0) };
        match Spool::open(directory, protocol, QUEUE_MAX, QUEUE_BYTES_MAX) {
            Ok((spool, kept, lost)) => {
                let mut queue = Self { spool: Some(spool), ..Self::default() };
                for one in kept {
                    let parcel =
                        Parcel { path: one.path, body: one.body, source: None, receipt: Receipt::default(), file: Some(one.number) };
                    queue.bytes += parcel.bytes();
                    queue.parcels.push_back(parcel);
                }
                (queue, lost)
            }
            Err(error) => {
                tracing::warn!("profiles that wait end with the agent: cannot use {}: {error} (push.spool_directory)", directory.display());
                (Self::default(), 0)
            }
        }
    }

    /// Adds one; returns those that were dropped for it.
    pub fn add(&mut self, parcel: Parcel) -> Vec<Parcel> {
        self.bytes += parcel.bytes();
        self.parcels.push_back(parcel);
        let mut dropped = Vec::new();
        while self.parcels.len() > QUEUE_MAX || (self.parcels.len() > 1 && self.bytes > QUEUE_BYTES_MAX) {
            dropped.extend(self.pop());
        }
        dropped
    }

    /// The oldest.
    pub fn front(&self) -> Option<&Parcel> {
        self.parcels.front()
    }

    /// Removes the oldest, also from the disk.
    pub fn pop(&mut self) -> Option<Parcel> {
        let parcel = self.parcels.pop_front()?;
        self.bytes -= parcel.bytes();
        if let (Some(spool), Some(number)) = (&self.spool, parcel.file) {
            spool.remove(number);
        }
        Some(parcel)
    }

    /// Number of profiles.
    pub fn len(&self) -> usize {
        self.parcels.len()
    }

    /// Writes to disk what is not there yet. A failure is logged once; what was not written is only in memory.
    pub fn keep(&mut self) {
        let Some(spool) = &mut self.spool else { return };
        for parcel in self.parcels.iter_mut().filter(|parcel| parcel.file.is_none()) {
            match spool.keep(&parcel.path, &parcel.body) {
                Ok(number) => parcel.file = Some(number),
                Err(error) => {
                    if !std::mem::replace(&mut self.told, true) {
                        tracing::warn!("profiles that wait cannot be written to disk: {error} (push.spool_directory)");
                    }
                    return;
                }
            }
        }
        self.told = false;
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::process::ProcessId;
    use crate::units::Pid;

    fn parcel(path: &str, bytes: usize) -> Parcel {
        let source = Some((ProcessId { pid: Pid(1), start_ticks: 1 }, "exact"));
        Parcel { path: path.to_owned(), body: vec![0; bytes], source, receipt: Receipt::default(), file: None }
    }

    #[test]
    fn the_oldest_profile_is_dropped_when_too_many_wait() {
        let mut queue = Queue::default();
        let dropped: usize = (0..QUEUE_MAX + 3).map(|at| queue.add(parcel(&at.to_string(), 10)).len()).sum();
        assert_eq!((dropped, queue.len(), queue.front().unwrap().path.as_str()), (3, QUEUE_MAX, "3"));
        assert_eq!(queue.add(parcel("large", QUEUE_BYTES_MAX + 1)).len(), QUEUE_MAX);
    }

    #[test]
    fn what_was_written_is_there_after_a_restart_and_what_was_sent_is_not() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("push");
        let (mut queue, _) = Queue::open(Some(&directory), "parca");
        for path in ["/a", "/b", "/c"] {
            queue.add(parcel(path, 5));
        }
        queue.keep();
        queue.add(parcel("/never written", 5));
        assert_eq!(queue.pop().unwrap().path, "/a");
        let (again, lost) = Queue::open(Some(&directory), "parca");
        let paths: Vec<&str> = again.parcels.iter().map(|parcel| parcel.path.as_str()).collect();
        assert_eq!((paths, lost), (vec!["/b", "/c"], 0));
        assert!(again.front().unwrap().source.is_none());
        let unusable = place.path().join("file");
        std::fs::write(&unusable, "").unwrap();
        let (mut queue, _) = Queue::open(Some(&unusable), "parca");
        queue.add(parcel("/d", 5));
        queue.keep();
        assert_eq!(queue.front().unwrap().file, None);
    }
}
