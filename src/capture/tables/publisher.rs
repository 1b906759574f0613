//! Changes entries of a map of maps without waiting for what the kernel waits for.
//!
//! The system call that changes such an entry changes it at once, and then returns only after an RCU grace period, some 15 ms, so that its
//! caller knows that no program still uses the old map (`maybe_wait_bpf_programs`, kernel/bpf/syscall.c). Nobody here needs to know: a
//! walk keeps the map that it found. But a process may stand still meanwhile. So the calls are made by threads of their own, and the
//! caller goes on as soon as a look-up shows the change.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle};

use crate::capture::{Error, Result};

/// Changes that may wait for their grace period at the same time; one more waits for its turn.
const THREADS: usize = 4;
/// How often a change is looked for: the call takes about as long to begin.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// One change.
struct Change {
    key: u32,
    /// The new inner map; `None`: the entry is taken out.
    inner: Option<MapHandle>,
    done: SyncSender<libbpf_rs::Result<()>>,
}

/// A map of maps by a number, and the threads that change it. They end when this is dropped and their last change is done.
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

    /// Takes an entry out.
    ///
    /// # Errors
    /// If the kernel refuses, or there is none.
    pub fn remove(&self, key: u32) -> Result<()> {
        self.change(key, None, None)
    }

    fn change(&self, key: u32, inner: Option<MapHandle>, becomes: Option<u32>) -> Result<()> {
        let (done, result) = sync_channel(1);
        // A thread that ended drops the change, which is seen below.
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

    /// The id of an entry's inner map: what a look-up in a map of maps gives user space.
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
        // Whoever asked has seen it already.
        let _ = done.send(changed);
    }
}
