//! Reading the rings: one named thread each.
//!
//! The programs never wake the reader (a wake-up costs more than the record), so it polls: at once while records keep coming, after a
//! short sleep when there were none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use libbpf_rs::{MapHandle, RingBufferBuilder};

use super::wire::{self, Record};
use super::{Error, Result};

/// Records handled before the sink hears of a pause, so that a busy process cannot keep it from its other work.
pub const BATCH_RECORDS: usize = 16 << 10;
/// Sleep when a ring was found empty. At 5 ms a ring that fills at 90 MB/s holds 450 KB: far below its size.
const IDLE: Duration = Duration::from_millis(5);

/// What becomes of the records of one ring. Lives on the ring's thread.
pub trait Sink: Send {
    /// A record, in ring order.
    fn record(&mut self, record: &Record<'_>);
    /// The ring is empty, or a batch is done: time for other work. Called at least every few milliseconds.
    fn pause(&mut self);
    /// The last call: everything sent before [`Readers::stop`] has been handed over.
    fn finish(&mut self);
}

/// What the readers saw.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Read {
    /// Records that did not have the form of their kind.
    pub malformed: u64,
    /// Records that end a call of the allocator, one each: allocations and frees, but for a realloc's free of the old block.
    pub calls: u64,
}

#[derive(Debug, Default)]
struct Counts {
    malformed: AtomicU64,
    calls: AtomicU64,
}

/// The reader threads; [`Readers::stop`] drains the rings and joins them.
#[must_use]
pub struct Readers {
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    threads: Vec<JoinHandle<()>>,
}

impl Readers {
    /// What was read so far.
    pub fn read(&self) -> Read {
        Read { malformed: self.counts.malformed.load(Ordering::Relaxed), calls: self.counts.calls.load(Ordering::Relaxed) }
    }

    /// Hands over what is still in the rings, then ends the threads. Take the probes out first.
    pub fn stop(mut self) -> Read {
        self.stop_and_join();
        self.read()
    }

    fn stop_and_join(&mut self) {
        self.stop.store(true, Ordering::Release);
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("a ring reader ended in a panic: its records are lost");
            }
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

/// Starts the readers, ring by ring.
pub fn start(rings: &[MapHandle], sinks: Vec<Box<dyn Sink>>) -> Result<Readers> {
    let mut readers = Readers { stop: Arc::default(), counts: Arc::default(), threads: Vec::new() };
    for (shard, (ring, sink)) in rings.iter().zip(sinks).enumerate() {
        let ring = MapHandle::try_from(ring).map_err(|source| Error::Map { map: "rings", source })?;
        let (stop, counts) = (Arc::clone(&readers.stop), Arc::clone(&readers.counts));
        let thread =
            std::thread::Builder::new().name(format!("fragprof-ring-{shard}")).spawn(move || read_ring(&ring, sink, &stop, &counts))?;
        readers.threads.push(thread);
    }
    Ok(readers)
}

fn read_ring(ring: &MapHandle, sink: Box<dyn Sink>, stop: &AtomicBool, counts: &Counts) {
    // The callback and the loop below both use the sink, never at the same time.
    let sink = std::cell::RefCell::new(sink);
    let calls = std::cell::Cell::new(0);
    let on_record = |bytes: &[u8]| {
        match wire::decode(bytes) {
            Ok(record) => {
                calls.set(calls.get() + u64::from(record.body.ends_a_call()));
                sink.borrow_mut().record(&record);
            }
            Err(error) => {
                counts.malformed.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("{error}");
            }
        }
        0
    };
    let mut builder = RingBufferBuilder::new();
    let buffer = match builder.add(ring, on_record).map(|_| ()).and_then(|()| builder.build()) {
        Ok(buffer) => buffer,
        Err(error) => {
            tracing::error!("cannot read a ring buffer: {error:#}");
            return;
        }
    };
    loop {
        // Asked before the ring is emptied: what was sent before stop() is then seen for certain.
        let last = stop.load(Ordering::Acquire);
        let records = buffer.consume_raw_n(BATCH_RECORDS);
        counts.calls.fetch_add(calls.take(), Ordering::Relaxed);
        sink.borrow_mut().pause();
        if records > 0 {
            continue;
        }
        if last {
            break;
        }
        std::thread::sleep(IDLE);
    }
    sink.borrow_mut().finish();
}
