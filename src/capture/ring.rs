//! Reads the rings: one named thread each.
//!
//! The programs never wake the reader (a wake-up costs more than the record), so it polls: immediately while records keep arriving,
//! otherwise after a short sleep.

use std::os::fd::{AsFd as _, AsRawFd as _};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use libbpf_rs::{MapCore as _, MapFlags, MapHandle, MapType, RingBufferBuilder};

use super::wire::{self, Record};
use super::{Counters, Error, Result};
use crate::bpf::SHARDS_MAX;
use crate::units::page_bytes;

/// Maximum number of records between two calls of [`Sink::pause`], so that a busy process cannot keep the sink from its other work.
pub const BATCH_RECORDS: usize = 16 << 10;
/// Sleep after a ring was found empty. In 5 ms a process that produces 90 MB/s writes 450 KB: far below the ring's size.
const IDLE: Duration = Duration::from_millis(5);

/// The consumer of one ring's records. Runs on the ring's thread.
pub trait Sink: Send {
    /// A record, in ring order.
    fn record(&mut self, record: &Record<'_>);
    /// The ring is empty, or a batch is complete: time for other work. Called at least every few milliseconds.
    fn pause(&mut self);
    /// The last call: everything sent before [`Ring::stop`] has been passed to the sink.
    fn finish(&mut self);
}

/// The reader's counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Read {
    /// Records that were not valid for their kind.
    pub malformed: u64,
    /// Records that end a call of the allocator, one per call: allocations and frees, but not a realloc's free of the old block.
    pub calls: u64,
}

#[derive(Debug, Default)]
struct Counts {
    malformed: AtomicU64,
    calls: AtomicU64,
}

/// The open rings, by number.
#[derive(Debug)]
pub struct Rings {
    /// The programs' map of rings.
    outer: MapHandle,
    open: Mutex<[bool; SHARDS_MAX as usize]>,
}

impl Rings {
    /// No ring is open in the map `rings`.
    #[must_use]
    pub fn new(outer: MapHandle) -> Self {
        Self { outer, open: Mutex::default() }
    }

    fn open(&self) -> MutexGuard<'_, [bool; SHARDS_MAX as usize]> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A ring buffer with its reader thread. Dropping it drains and closes it; remove the targets first.
#[must_use]
#[derive(Debug)]
pub struct Ring {
    number: Number,
    bytes: u32,
    /// The programs' counts when it was opened.
    pub(super) before: Counters,
    stop: Arc<AtomicBool>,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

/// A ring's number, which is freed on drop.
#[derive(Debug)]
struct Number(Arc<Rings>, u32);

impl Drop for Number {
    fn drop(&mut self) {
        if let Err(error) = self.0.outer.delete(&self.1.to_ne_bytes()) {
            tracing::debug!("ring {}: {error}", self.1);
        }
        if let Some(open) = self.0.open().get_mut(self.1 as usize) {
            *open = false;
        }
    }
}

impl Ring {
    /// Its number, by which targets refer to it.
    #[must_use]
    pub fn shard(&self) -> u32 {
        self.number.1
    }

    /// Its size.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.bytes
    }

    /// The reader's counts so far.
    #[must_use]
    pub fn read(&self) -> Read {
        Read { malformed: self.counts.malformed.load(Ordering::Relaxed), calls: self.counts.calls.load(Ordering::Relaxed) }
    }

    /// Passes on what is still in the ring, then ends the thread. Returns the total counts. Detach the probes first.
    pub fn stop(&mut self) -> Read {
        self.stop.store(true, Ordering::Release);
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("a ring reader panicked: its records are lost");
        }
        self.read()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Creates a ring, makes it available to the programs, and starts its reader.
pub fn open(rings: &Arc<Rings>, bytes: u32, sink: Box<dyn Sink>) -> Result<Ring> {
    let number = {
        let mut open = rings.open();
        let free = open.iter().position(|open| !open).ok_or(Error::TooManyRings { max: SHARDS_MAX })?;
        open[free] = true;
        Number(Arc::clone(rings), free as u32)
    };
    let bytes = bytes.max(page_bytes() as u32).checked_next_power_of_two().unwrap_or(1 << 31);
    let options =
        libbpf_sys::bpf_map_create_opts { sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t, ..Default::default() };
    let map_error = |source| Error::Map { map: "rings", source };
    let map = MapHandle::create(MapType::RingBuf, Some("fragprof_ring"), 0, 0, bytes, &options).map_err(map_error)?;
    rings.outer.update(&number.1.to_ne_bytes(), &map.as_fd().as_raw_fd().to_ne_bytes(), MapFlags::ANY).map_err(map_error)?;
    let (stop, counts) = (Arc::<AtomicBool>::default(), Arc::<Counts>::default());
    let thread = {
        let (stop, counts) = (Arc::clone(&stop), Arc::clone(&counts));
        std::thread::Builder::new().name(format!("fragprof-ring-{}", number.1)).spawn(move || read_ring(&map, sink, &stop, &counts))?
    };
    Ok(Ring { number, bytes, before: Counters::default(), stop, counts, thread: Some(thread) })
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
        // Loaded before the ring is emptied: everything sent before stop() is then certainly read.
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
