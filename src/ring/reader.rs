//! Reads the chunks of all processes and passes on each process's events in the order of their tickets.
//!
//! Tickets have no gaps, so the next event of a process is known before it is there. A thread that has drawn a ticket and has not written its
//! event yet holds up the others of its process, for nanoseconds or until it runs again; their events wait in the memory. A ticket that does not
//! come although the process goes on (its thread was stopped in between and left the call by a jump) is given up and counted.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::mem::offset_of;
use std::sync::atomic::Ordering;

use super::chunk::{self, Cell, Event};
use super::memory::{Counter, Memory};
use crate::bpf::{self, RingOrigin, RingProcess};

/// Entries for process images.
const ENTRIES: usize = bpf::RING_PROCESSES as usize;
/// Events passed on for one process in one pass: others are not kept waiting.
const EVENTS_MAX: usize = 64 << 10;
/// Passes in which a process wrote something new and the ticket that is next did not come, until it is given up: about two seconds.
const PASSES_WITHOUT: u32 = 400;

/// Takes what is read.
pub trait Receiver {
    /// A process image waits for [`Reader::admit`]; told once.
    fn announced(&mut self, announced: &Announced);
    /// The image of an entry was replaced by another one of the same process, which is announced next: nothing more comes from it.
    fn replaced(&mut self, entry: usize, counts: &Counts);
    /// An event of an admitted process image.
    fn event(&mut self, entry: usize, event: &Event);
    /// Defines a stack's number, before or soon after the first event that names it. `end`: why the walk ended.
    fn stack(&mut self, entry: usize, number: u32, frames: &[u64], end: u8);
    /// A thread has ended.
    fn thread_ended(&mut self, entry: usize, tid: u32);
    /// All events of an image that has ended have been passed on.
    fn ended(&mut self, entry: usize, counts: &Counts);
    /// Whether a thread still exists.
    fn is_thread(&mut self, entry: usize, tid: u32) -> bool;
}

/// A process image that begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// Its entry.
    pub entry: usize,
    /// Its pid, as it says.
    pub pid: u32,
    /// How it began.
    pub origin: RingOrigin,
    /// The entry of the process that forked it.
    pub parent: Option<usize>,
}

/// What was lost of a process image, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Allocations that found no free chunk.
    pub allocations: u64,
    /// Frees that found none.
    pub frees: u64,
    /// Stacks that found none, or no number.
    pub stacks: u64,
    /// Other events.
    pub others: u64,
    /// Events that a thread began and never wrote.
    pub abandoned: u64,
    /// Calls before the library was attached.
    pub early: u64,
    /// Allocations that failed.
    pub failed: u64,
}

/// A chunk that a process owns.
#[derive(Debug, Clone, Copy)]
struct Open {
    entry: usize,
    tid: u32,
    serial: u64,
    /// The next cell to read, and the first that is not complete yet.
    at: u32,
    cells: u32,
    /// Its head is in the heap of its process.
    is_queued: bool,
    /// Its owner writes no more.
    is_over: bool,
}

/// A process image.
#[derive(Debug, Default)]
struct Image {
    pid: u32,
    is_admitted: bool,
    is_ended: bool,
    /// It ended by executing a program.
    is_replaced: bool,
    next_ticket: u64,
    /// Chunks by the ticket of their first event that was not passed on.
    heads: BinaryHeap<Reverse<(u64, u32)>>,
    passes_without: u32,
    abandoned: u64,
    /// Its chunks.
    chunks: Vec<u32>,
}

/// Reads the memory. Belongs to one thread.
#[derive(Debug)]
pub struct Reader {
    images: Vec<Option<Image>>,
    chunks: Vec<Option<Open>>,
    /// Chunks and cells without a meaning.
    malformed: u64,
    frames: Vec<u64>,
}

/// Reads what lies between the events of chunks.
struct Stacks<'a> {
    memory: &'a Memory,
    frames: &'a mut Vec<u64>,
    malformed: &'a mut u64,
}

impl Stacks<'_> {
    /// Passes on the stacks of a chunk up to its next event, and returns the event's ticket.
    fn pass(&mut self, receiver: &mut dyn Receiver, entry: usize, chunk: u32, open: &mut Open) -> Option<u64> {
        while open.at < open.cells {
            match chunk::cell(self.memory, chunk, open.at, open.cells - open.at) {
                Cell::Event(ticket) => return Some(ticket),
                Cell::Stack(cells) => {
                    let (number, end) = chunk::stack(self.memory, chunk, open.at, self.frames);
                    receiver.stack(entry, number, self.frames, end);
                    open.at += cells;
                }
                Cell::Malformed => {
                    *self.malformed += 1;
                    open.at = open.cells;
                }
            }
        }
        None
    }
}

impl Reader {
    /// Nothing has been read yet.
    #[must_use]
    pub fn new(memory: &Memory) -> Self {
        Self {
            images: std::iter::repeat_with(|| None).take(ENTRIES).collect(),
            chunks: vec![None; memory.chunks() as usize],
            malformed: 0,
            frames: Vec::new(),
        }
    }

    /// Chunks and cells that made no sense.
    #[must_use]
    pub fn malformed(&self) -> u64 {
        self.malformed
    }

    /// From now on the events of an announced process image are passed on.
    pub fn admit(&mut self, entry: usize) {
        if let Some(Some(image)) = self.images.get_mut(entry) {
            image.is_admitted = true;
        }
    }

    /// The process of an image has ended: what it wrote is still passed on, then its chunks and its entry are freed.
    pub fn end(&mut self, entry: usize) {
        if let Some(Some(image)) = self.images.get_mut(entry) {
            image.is_ended = true;
        }
    }

    /// The process of an image has executed a program that does not announce itself.
    pub fn replace(&mut self, entry: usize) {
        if let Some(Some(image)) = self.images.get_mut(entry) {
            image.is_ended = true;
            image.is_replaced = true;
        }
    }

    /// What was lost of a process image.
    #[must_use]
    pub fn counts(&self, memory: &Memory, entry: usize) -> Counts {
        let read = |field| memory.process64(entry, field).load(Ordering::Relaxed);
        Counts {
            allocations: read(offset_of!(RingProcess, lost_allocs)),
            frees: read(offset_of!(RingProcess, lost_frees)),
            stacks: read(offset_of!(RingProcess, lost_stacks)),
            others: read(offset_of!(RingProcess, lost_others)),
            abandoned: self.images.get(entry).and_then(Option::as_ref).map_or(0, |image| image.abandoned),
            early: read(offset_of!(RingProcess, early)),
            failed: read(offset_of!(RingProcess, failed)),
        }
    }

    /// One pass over everything. `looks_for_threads`: also finds threads that have ended. Returns whether anything was passed on.
    pub fn pass(&mut self, memory: &Memory, receiver: &mut dyn Receiver, looks_for_threads: bool) -> bool {
        memory.beat();
        self.meet(memory, receiver);
        self.open(memory);
        if looks_for_threads {
            self.look_for_threads(memory, receiver);
        }
        let now = Counter::now();
        let mut is_any = false;
        for entry in 0..ENTRIES {
            is_any |= self.pass_on(memory, receiver, entry, now);
        }
        is_any
    }

    /// Finds new process images.
    fn meet(&mut self, memory: &Memory, receiver: &mut dyn Receiver) {
        for entry in 0..ENTRIES {
            let read = |field| memory.process32(entry, field).load(Ordering::Relaxed);
            let state = memory.process32(entry, offset_of!(RingProcess, state)).load(Ordering::Acquire);
            if state != bpf::RING_PROCESS_ANNOUNCED || self.images.get(entry).is_none_or(Option::is_some) {
                continue;
            }
            let (pid, parent) = (read(offset_of!(RingProcess, pid)), read(offset_of!(RingProcess, parent)));
            let Some(origin) = RingOrigin::from_wire(read(offset_of!(RingProcess, origin))) else {
                self.malformed += 1;
                Self::free_entry(memory, entry);
                continue;
            };
            // A process has one image at a time.
            let former = self.images.iter().position(|image| image.as_ref().is_some_and(|image| image.pid == pid && !image.is_ended));
            if let Some(former) = former {
                self.open(memory);
                self.replace(former);
                while self.images.get(former).is_some_and(Option::is_some) {
                    let is_admitted = self.images.get(former).and_then(Option::as_ref).is_some_and(|image| image.is_admitted);
                    self.pass_on(memory, receiver, former, Counter::now());
                    if !is_admitted {
                        break;
                    }
                }
            }
            if let Some(image) = self.images.get_mut(entry) {
                *image = Some(Image { pid, ..Image::default() });
            }
            let parent = (parent as usize).checked_sub(1).filter(|parent| *parent < ENTRIES);
            receiver.announced(&Announced { entry, pid, origin, parent });
        }
    }

    /// Clears an entry, so that another image can take it.
    fn free_entry(memory: &Memory, entry: usize) {
        for field in [
            offset_of!(RingProcess, lost_allocs),
            offset_of!(RingProcess, lost_frees),
            offset_of!(RingProcess, lost_stacks),
            offset_of!(RingProcess, lost_others),
            offset_of!(RingProcess, nested),
            offset_of!(RingProcess, early),
            offset_of!(RingProcess, failed),
        ] {
            memory.process64(entry, field).store(0, Ordering::Relaxed);
        }
        for field in [offset_of!(RingProcess, look), offset_of!(RingProcess, looked), offset_of!(RingProcess, in_front)] {
            memory.process32(entry, field).store(0, Ordering::Relaxed);
        }
        memory.process32(entry, offset_of!(RingProcess, state)).store(bpf::RING_PROCESS_FREE, Ordering::Release);
    }

    /// Finds chunks that were claimed.
    fn open(&mut self, memory: &Memory) {
        for chunk in 0..memory.chunks() {
            let Some(slot @ None) = self.chunks.get_mut(chunk as usize) else { continue };
            let state = memory.state(chunk).load(Ordering::Acquire);
            if state & 0xff < bpf::RING_CHUNK_OPEN {
                continue;
            }
            let entry = (state >> bpf::RING_STATE_BITS) as usize;
            let image = entry.checked_sub(1).and_then(|entry| Some((entry, self.images.get_mut(entry)?.as_mut()?)));
            let Some((entry, image)) = image else {
                self.malformed += 1;
                memory.give_back(chunk);
                continue;
            };
            image.chunks.push(chunk);
            let (tid, serial) = (memory.tid(chunk), memory.serial(chunk));
            *slot = Some(Open { entry, tid, serial, at: 0, cells: 0, is_queued: false, is_over: false });
            // The thread has another chunk that it did not leave: that was another thread, with the same number.
            let same = |open: &&mut Open| open.entry == entry && open.tid == tid && open.serial < serial;
            for former in self.chunks.iter_mut().flatten().filter(same) {
                former.is_over = true;
            }
        }
    }

    fn look_for_threads(&mut self, memory: &Memory, receiver: &mut dyn Receiver) {
        for (chunk, open) in (0u32..).zip(&mut self.chunks) {
            let Some(open) = open.as_mut().filter(|open| !open.is_over && open.at == open.cells) else { continue };
            if !receiver.is_thread(open.entry, open.tid) && memory.cells(chunk) == open.cells {
                open.is_over = true;
            }
        }
    }

    /// Passes on events of an image. Returns whether there were any.
    fn pass_on(&mut self, memory: &Memory, receiver: &mut dyn Receiver, entry: usize, now: Counter) -> bool {
        let Some(Some(image)) = self.images.get(entry) else { return false };
        if !image.is_admitted {
            if image.is_ended {
                self.close(memory, receiver, entry);
            }
            return false;
        }
        let is_ended = image.is_ended;
        let has_new = self.queue(memory, receiver, entry);
        let mut passed = 0;
        let age = memory.age(now);
        while passed < EVENTS_MAX {
            let Some(Some(image)) = self.images.get_mut(entry) else { break };
            let Some(&Reverse((ticket, chunk))) = image.heads.peek() else { break };
            if ticket > image.next_ticket {
                // Another chunk may have it by now.
                if self.queue(memory, receiver, entry) {
                    continue;
                }
                let Some(Some(image)) = self.images.get_mut(entry) else { break };
                image.passes_without += u32::from(has_new);
                if !is_ended && image.passes_without < PASSES_WITHOUT {
                    break;
                }
                image.passes_without = 0;
                image.abandoned = image.abandoned.saturating_add(1);
                image.next_ticket = ticket;
                continue;
            }
            image.heads.pop();
            passed += self.run(memory, receiver, entry, chunk, &age);
        }
        self.give_back(memory, receiver, entry);
        let is_empty = self.images.get(entry).and_then(Option::as_ref).is_some_and(|image| image.heads.is_empty());
        // A chunk that was queued in an earlier pass was read up to the cells that it had then.
        if is_ended && is_empty && !self.queue(memory, receiver, entry) {
            self.close(memory, receiver, entry);
        }
        passed > 0
    }

    /// Passes on the events of a chunk as long as they follow each other. Returns how many.
    fn run(&mut self, memory: &Memory, receiver: &mut dyn Receiver, entry: usize, chunk: u32, age: &dyn Fn(u32) -> u64) -> usize {
        let (Some(Some(image)), Some(Some(open))) = (self.images.get_mut(entry), self.chunks.get_mut(chunk as usize)) else { return 0 };
        let mut passed = 0;
        open.is_queued = false;
        let mut stacks = Stacks { memory, frames: &mut self.frames, malformed: &mut self.malformed };
        while let Some(ticket) = stacks.pass(receiver, entry, chunk, open) {
            if ticket > image.next_ticket {
                image.heads.push(Reverse((ticket, chunk)));
                open.is_queued = true;
                break;
            }
            if ticket < image.next_ticket {
                // It was given up before: its place in the order is gone.
                *stacks.malformed += 1;
            } else if let Some(event) = chunk::event(memory, chunk, open.at, open.tid, age) {
                image.passes_without = 0;
                image.next_ticket += 1;
                receiver.event(entry, &event);
            }
            passed += 1;
            open.at += 1;
            if passed >= EVENTS_MAX {
                break;
            }
        }
        passed
    }

    /// Queues the chunks of an image that have new cells. Returns whether there were any.
    fn queue(&mut self, memory: &Memory, receiver: &mut dyn Receiver, entry: usize) -> bool {
        let Some(Some(image)) = self.images.get_mut(entry) else { return false };
        let mut has_new = false;
        let mut stacks = Stacks { memory, frames: &mut self.frames, malformed: &mut self.malformed };
        for &chunk in &image.chunks {
            let open = self.chunks.get_mut(chunk as usize).and_then(Option::as_mut);
            let Some(open) = open.filter(|open| open.entry == entry && !open.is_queued) else { continue };
            // The process may write any number at any time: it only ever grows here.
            open.cells = memory.cells(chunk).max(open.cells);
            if let Some(ticket) = stacks.pass(receiver, entry, chunk, open) {
                image.heads.push(Reverse((ticket, chunk)));
                open.is_queued = true;
                has_new = true;
            }
        }
        has_new
    }

    /// Gives back the chunks of an image that are read and over.
    fn give_back(&mut self, memory: &Memory, receiver: &mut dyn Receiver, entry: usize) {
        let Some(Some(image)) = self.images.get_mut(entry) else { return };
        image.chunks.retain(|&chunk| {
            let Some(slot) = self.chunks.get_mut(chunk as usize) else { return false };
            let Some(open) = slot.filter(|open| open.entry == entry && !open.is_queued && open.at == open.cells) else { return true };
            let is_left = memory.state(chunk).load(Ordering::Acquire) & 0xff == bpf::RING_CHUNK_FULL;
            // The thread may have written more before it left.
            if !(is_left || open.is_over) || memory.cells(chunk) > open.at {
                return true;
            }
            *slot = None;
            memory.give_back(chunk);
            if open.is_over && !is_left {
                receiver.thread_ended(entry, open.tid);
            }
            false
        });
    }

    /// Frees everything of an image.
    fn close(&mut self, memory: &Memory, receiver: &mut dyn Receiver, entry: usize) {
        let is_replaced = self.images.get(entry).and_then(Option::as_ref).is_some_and(|image| image.is_replaced);
        for chunk in 0..memory.chunks() {
            let Some(slot) = self.chunks.get_mut(chunk as usize) else { continue };
            let owner = (memory.state(chunk).load(Ordering::Acquire) >> bpf::RING_STATE_BITS) as usize;
            if slot.is_some_and(|open| open.entry == entry) || slot.is_none() && owner == entry + 1 {
                *slot = None;
                memory.give_back(chunk);
            }
        }
        let counts = self.counts(memory, entry);
        if is_replaced {
            receiver.replaced(entry, &counts);
        } else {
            receiver.ended(entry, &counts);
        }
        if let Some(image) = self.images.get_mut(entry) {
            *image = None;
        }
        Self::free_entry(memory, entry);
    }
}
