//! Changes entries of a map of maps without waiting for the kernel's grace period.
//!
//! The system call changes such an entry immediately, but returns only after an RCU grace period, about 15 ms, so that its caller knows
//! that no program still uses the old map (`maybe_wait_bpf_programs`, kernel/bpf/syscall.c). That is not needed here: a walk keeps the map
//! that it found. But a process may be stopped meanwhile. So separate threads make the calls, and the caller continues as soon as a lookup
//! shows the change.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use crate::capture::{Error, Result};

/// Maximum number of changes that wait for their grace period at the same time; further ones are queued.
const THREADS: usize = 4;
/// Interval between two checks for the change: about the time until the call takes effect.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// One change.
struct Change {
    key: u32,
    /// The new inner map; `None`: the entry is removed.
    inner: Option<MapHandle>,
    done: SyncSender<libbpf_rs::Result<()>>,
}

/// A map of maps indexed by a number, and the threads that change it. The threads end when this is dropped and their last change is done.
#[derive(Debug)]
pub struct Publisher {
    name: &'static str,
    outer: Arc<MapHandle>,
    changes: Sender<Change>,
}

impl Publisher {
    /// Starts the threads.
    ///
    /// # Errors
    /// If one cannot be started.
    pub fn new(name: &'static str, outer: MapHandle) -> Result<Self> {
        let (changes, waiting) = channel();
        let (outer, waiting) = (Arc::new(outer), Arc::new(Mutex::new(waiting)));
        for _ in 0..THREADS {
            let (outer, waiting) = (Arc::clone(&outer), Arc::clone(&waiting));
            std::thread::Builder::new().name("fragprof-maps".into()).spawn(move || work(&outer, &waiting))?;
        }
        Ok(Self { name, outer, changes })
    }

    /// Sets an entry. Programs that look it up from now on find the new map.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn set(&self, key: u32, inner: MapHandle) -> Result<()> {
        let id = inner.info().map_err(|source| self.error(source))?.info.id;
        self.change(key, Some(inner), Some(id))
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// If the kernel refuses, or there is none.
    pub fn remove(&self, key: u32) -> Result<()> {
        self.change(key, None, None)
    }

    fn change(&self, key: u32, inner: Option<MapHandle>, becomes: Option<u32>) -> Result<()> {
        let (done, result) = sync_channel(1);
        // If the thread has ended, the change is dropped, which is detected below.
        drop(self.changes.send(Change { key, inner, done }));
        loop {
            match result.recv_timeout(LOOK_EVERY) {
                Ok(changed) => return changed.map_err(|source| self.error(source)),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(self.error(libbpf_rs::Error::from(std::io::Error::other("the thread that changes it has ended"))));
                }
                Err(RecvTimeoutError::Timeout) if self.id_of(key) == becomes => return Ok(()),
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// The id of an entry's inner map, which is what a lookup in a map of maps returns in user space.
    fn id_of(&self, key: u32) -> Option<u32> {
        let id = self.outer.lookup(&key.to_ne_bytes(), MapFlags::ANY).ok()??;
        Some(u32::from_ne_bytes(id.try_into().ok()?))
    }

    fn error(&self, source: libbpf_rs::Error) -> Error {
        Error::Map { map: self.name, source }
    }
}

fn work(outer: &MapHandle, waiting: &Mutex<Receiver<Change>>) {
    loop {
        let next = waiting.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(Change { key, inner, done }) = next else { return };
        let changed = match &inner {
            Some(inner) => outer.update(&key.to_ne_bytes(), &inner.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY),
            None => outer.delete(&key.to_ne_bytes()),
        };
        // The caller has already seen the change.
        let _ = done.send(changed);
    }
}
