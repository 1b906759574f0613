//! The thread that reads the shared memory: passes what it reads to the sink of a recording, in the form of records.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::allocator::functions::{Family, find};
use crate::bpf;
use crate::capture::wire::{Body, Head, Record};
use crate::capture::{Read, Sink as _, Slot, TargetLoss};
use crate::ring::{Announced, Counts, Event, Kind, Memory, Reader, Receiver};
use crate::session::monotonic_ns;
use crate::session::sink::LedgerSink;
use crate::units::StackHash;
use crate::unwind::End;

/// Sleep after the memory was found without anything new, unless a process rings.
const IDLE: Duration = Duration::from_millis(5);
/// Time between two looks for threads that have ended.
const THREADS_EVERY: Duration = Duration::from_millis(200);
/// Longest time for what processes that go on have begun to write when a recording ends.
const LAST_WITHIN: Duration = Duration::from_millis(50);
/// Incomplete stacks of a process whose ends are kept.
const INCOMPLETE_MAX: usize = 1 << 16;
/// What the driver must act on.
#[derive(Debug, Clone, Copy)]
pub enum Told {
    /// A process image waits.
    Announced(Announced),
    /// Nothing more comes from an entry: its process ended, or has another image.
    Over {
        /// Whose.
        slot: Slot,
        /// What was lost of it.
        loss: TargetLoss,
        /// Its process has another image.
        is_replaced: bool,
    },
}

/// A process whose entry was admitted.
#[derive(Debug, Clone, Copy)]
struct Known {
    slot: Slot,
    /// Whether its threads have the numbers that they have here.
    same_tids: bool,
    pid: u32,
}

/// What the driver and the thread share.
#[derive(Debug, Default)]
pub struct Control {
    known: Mutex<HashMap<usize, (Known, Progress)>>,
    stop: AtomicBool,
    calls: AtomicU64,
    malformed: AtomicU64,
    stacks_lost: AtomicU64,
    others_lost: AtomicU64,
    early: AtomicU64,
    failed: AtomicU64,
    losses: Mutex<HashMap<usize, (Slot, Counts)>>,
    ends: [AtomicU64; ENDS],
}

const ENDS: usize = 32;

/// How far the driver is with a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Admitted,
    Reading,
    Ended,
    Replaced,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Control {
    /// Lets the events of an announced image pass, as those of a slot.
    pub fn admit(&self, announced: &Announced, slot: Slot, same_tids: bool) {
        lock(&self.known).insert(announced.entry, (Known { slot, same_tids, pid: announced.pid }, Progress::Admitted));
    }

    /// The process of a slot has ended.
    pub fn ended(&self, slot: Slot) {
        self.advance(slot, Progress::Ended);
    }

    /// The process of a slot has executed a program that does not announce itself.
    pub fn replaced(&self, slot: Slot) {
        self.advance(slot, Progress::Replaced);
    }

    fn advance(&self, slot: Slot, to: Progress) {
        for (_, progress) in lock(&self.known).values_mut().filter(|(known, _)| known.slot == slot) {
            *progress = to;
        }
    }

    /// The entry of a slot.
    pub fn entry_of(&self, slot: Slot) -> Option<usize> {
        lock(&self.known).iter().find(|(_, (known, _))| known.slot == slot).map(|(entry, _)| *entry)
    }

    /// What was lost so far of images that are not over.
    pub fn losses(&self) -> Vec<(Slot, TargetLoss)> {
        lock(&self.losses).values().map(|(slot, counts)| (*slot, target_loss(counts))).collect()
    }

    /// The reader's counts.
    pub fn read(&self) -> Read {
        Read { malformed: self.malformed.load(Ordering::Relaxed), calls: self.calls.load(Ordering::Relaxed) }
    }

    /// Sums over all images: stacks lost, other records lost, calls before the library was attached, failed calls.
    pub fn sums(&self) -> [u64; 4] {
        let now = lock(&self.losses);
        let sum = |of: fn(&Counts) -> u64| now.values().map(|(_, counts)| of(counts)).fold(0, u64::saturating_add);
        [
            self.stacks_lost.load(Ordering::Relaxed) + sum(|counts| counts.stacks),
            self.others_lost.load(Ordering::Relaxed) + sum(|counts| counts.others),
            self.early.load(Ordering::Relaxed) + sum(|counts| counts.early),
            self.failed.load(Ordering::Relaxed) + sum(|counts| counts.failed),
        ]
    }

    /// Allocations by the end of their stack's walk.
    pub fn ends(&self) -> impl Iterator<Item = (End, u64)> + '_ {
        End::ALL.iter().map(|&end| (end, self.ends.get(end as usize).map_or(0, |count| count.load(Ordering::Relaxed))))
    }

    /// Ends the thread: what is written is still read.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }
}

/// Events that a thread began and never wrote may be allocations or frees.
fn target_loss(counts: &Counts) -> TargetLoss {
    TargetLoss {
        allocations: counts.allocations,
        frees: counts.frees.saturating_add(counts.abandoned),
        others: counts.others.saturating_add(counts.stacks),
        abandoned: 0,
    }
}

/// Reads until it is told to stop.
pub fn read(memory: &Memory, sink: LedgerSink, control: &Arc<Control>, told: Sender<Told>) {
    let mut reader = Reader::new(memory);
    let numbers = ["malloc", "calloc"].map(|name| find(Family::C, name.as_bytes()).map_or(0, |function| function.0));
    let mut feed = Feed {
        sink,
        control: Arc::clone(control),
        told,
        known: HashMap::new(),
        incomplete: HashMap::new(),
        functions: numbers,
        now_ns: monotonic_ns(),
        calls: 0,
        complete: 0,
    };
    let mut looked = Instant::now();
    let mut last_from: Option<Instant> = None;
    loop {
        let rung = memory.rung();
        if control.stop.load(Ordering::Acquire) && last_from.is_none() {
            last_from = Some(Instant::now());
        }
        feed.take_orders(&mut reader);
        let looks = looked.elapsed() >= THREADS_EVERY;
        if looks {
            looked = Instant::now();
        }
        let is_any = reader.pass(memory, &mut feed, looks);
        feed.publish(&reader, memory);
        feed.sink.pause();
        feed.now_ns = monotonic_ns();
        if is_any {
            continue;
        }
        match last_from {
            Some(from) if from.elapsed() >= LAST_WITHIN => break,
            Some(_) => std::thread::sleep(Duration::from_millis(1)),
            None => memory.wait(rung, IDLE),
        }
    }
    feed.sink.finish();
}

struct Feed {
    sink: LedgerSink,
    control: Arc<Control>,
    told: Sender<Told>,
    /// By entry.
    known: HashMap<usize, Known>,
    /// By entry: the ends of stacks that are not complete, by number.
    incomplete: HashMap<usize, HashMap<u32, u8>>,
    /// The numbers of malloc and calloc.
    functions: [u8; 2],
    now_ns: u64,
    calls: u64,
    complete: u64,
}

impl Feed {
    /// Does what the driver wants.
    fn take_orders(&mut self, reader: &mut Reader) {
        for (entry, (known, progress)) in lock(&self.control.known).iter_mut() {
            match progress {
                Progress::Admitted => {
                    self.known.insert(*entry, *known);
                    reader.admit(*entry);
                    *progress = Progress::Reading;
                }
                Progress::Reading => {}
                Progress::Ended => reader.end(*entry),
                Progress::Replaced => reader.replace(*entry),
            }
        }
    }

    fn publish(&mut self, reader: &Reader, memory: &Memory) {
        self.control.malformed.store(reader.malformed(), Ordering::Relaxed);
        self.control.calls.fetch_add(std::mem::take(&mut self.calls), Ordering::Relaxed);
        if let Some(complete) = self.control.ends.get(End::Complete as usize) {
            complete.fetch_add(std::mem::take(&mut self.complete), Ordering::Relaxed);
        }
        let mut losses = lock(&self.control.losses);
        losses.clear();
        losses.extend(self.known.iter().map(|(entry, known)| (*entry, (known.slot, reader.counts(memory, *entry)))));
    }

    fn send(&mut self, entry: usize, tid: u32, function: u8, time_ns: u64, body: Body<'_>) {
        let Some(known) = self.known.get(&entry) else { return };
        let time = time_ns & ((1 << bpf::STAMP_TIME_BITS) - 1);
        let head = Head {
            kind: 0,
            function,
            slot: known.slot.index,
            tid,
            stamp: time | u64::from(known.slot.generation as u16) << bpf::STAMP_TIME_BITS,
        };
        self.sink.record(&Record { head, body });
    }

    fn over(&mut self, entry: usize, counts: &Counts, is_replaced: bool) {
        let pid = self.known.get(&entry).map_or(0, |known| known.pid);
        let body = if is_replaced { Body::Exec { comm: [0; 16] } } else { Body::Exit { code: 0 } };
        self.send(entry, pid, 0, self.now_ns, body);
        lock(&self.control.known).remove(&entry);
        self.incomplete.remove(&entry);
        let Some(known) = self.known.remove(&entry) else { return };
        let add = |to: &AtomicU64, more: u64| to.fetch_add(more, Ordering::Relaxed);
        add(&self.control.stacks_lost, counts.stacks);
        add(&self.control.others_lost, counts.others);
        add(&self.control.early, counts.early);
        add(&self.control.failed, counts.failed);
        lock(&self.control.losses).remove(&entry);
        // A driver that is gone needs nothing.
        let _ = self.told.send(Told::Over { slot: known.slot, loss: target_loss(counts), is_replaced });
    }
}

impl Receiver for Feed {
    fn announced(&mut self, announced: &Announced) {
        // The child's stacks have its parent's numbers.
        let ends = announced.parent.and_then(|parent| self.incomplete.get(&parent)).cloned().unwrap_or_default();
        self.incomplete.insert(announced.entry, ends);
        let _ = self.told.send(Told::Announced(*announced));
    }

    fn replaced(&mut self, entry: usize, counts: &Counts) {
        self.over(entry, counts, true);
    }

    fn event(&mut self, entry: usize, event: &Event) {
        let stack = StackHash(u64::from(event.stack));
        let (function, body) = match event.kind {
            Kind::Alloc { size_bytes, alignment_bits, is_zeroed } => {
                let end = self.incomplete.get(&entry).filter(|ends| !ends.is_empty()).and_then(|ends| ends.get(&event.stack));
                if let Some(count) = end.and_then(|end| self.control.ends.get(usize::from(*end))) {
                    count.fetch_add(1, Ordering::Relaxed);
                } else {
                    self.complete += u64::from(event.stack != 0);
                }
                (self.functions[usize::from(is_zeroed)], Body::Alloc { addr: event.addr, size: size_bytes, stack, alignment_bits })
            }
            Kind::Free => (0, Body::Free { addr: event.addr, stack }),
            Kind::ReallocFree => (0, Body::ReallocFree { addr: event.addr }),
            Kind::ReallocFail => (0, Body::ReallocFail { addr: event.addr }),
            Kind::Fork { child } => (0, Body::Fork { child, shares_memory: false }),
        };
        self.calls += u64::from(body.ends_a_call());
        self.send(entry, event.tid, function, self.now_ns.saturating_sub(event.age_ns), body);
    }

    fn stack(&mut self, entry: usize, number: u32, frames: &[u64], end: u8) {
        // An end that does not exist would have no words.
        let end = End::from_wire(end).unwrap_or(End::Unsupported);
        if end != End::Complete
            && let Some(ends) = self.incomplete.get_mut(&entry).filter(|ends| ends.len() < INCOMPLETE_MAX)
        {
            ends.insert(number, end as u8);
        }
        self.send(entry, 0, 0, self.now_ns, Body::Stack { hash: StackHash(u64::from(number)), frames, end: end as u8 });
    }

    fn thread_ended(&mut self, entry: usize, tid: u32) {
        self.send(entry, tid, 0, self.now_ns, Body::ThreadExit);
    }

    fn ended(&mut self, entry: usize, counts: &Counts) {
        self.over(entry, counts, false);
    }

    fn is_thread(&mut self, entry: usize, tid: u32) -> bool {
        let known = self.known.get(&entry);
        known.is_none_or(|known| !known.same_tids || std::path::Path::new(&format!("/proc/{}/task/{tid}", known.pid)).exists())
    }
}
