//! The order of events, and what a process can do to the reader.
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;

use super::*;
use crate::bpf;

/// Writes memory as the library does.
struct Writer {
    bytes: Vec<u8>,
}

const CHUNK_BYTES: usize = bpf::RING_CHUNK_BYTES as usize;
const CHUNKS: usize = 4;
const HEAD_BYTES: usize = CHUNK_BYTES;

impl Writer {
    fn new() -> Self {
        Self { bytes: vec![0; HEAD_BYTES + CHUNKS * CHUNK_BYTES] }
    }

    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
    }

    /// An entry of a process image that waits.
    fn announce(&mut self, entry: usize, pid: u32) {
        let at = 4096 + entry * size_of::<bpf::RingProcess>();
        self.put(at, &bpf::RING_PROCESS_ANNOUNCED.to_le_bytes());
        self.put(at + 4, &pid.to_le_bytes());
        self.put(at + 8, &1u32.to_le_bytes());
    }

    /// A chunk of a thread with events (ticket, kind, address).
    fn chunk(&mut self, chunk: usize, entry: usize, tid: u32, state: u32, events: &[(u64, u8, u64)]) {
        let states = 4096 + bpf::RING_PROCESSES as usize * size_of::<bpf::RingProcess>();
        self.put(states + 4 * chunk, &(state | (entry as u32 + 1) << bpf::RING_STATE_BITS).to_le_bytes());
        let at = HEAD_BYTES + chunk * CHUNK_BYTES;
        self.put(at, &tid.to_le_bytes());
        self.put(at + 4, &(events.len() as u32).to_le_bytes());
        for (index, (ticket, kind, address)) in events.iter().enumerate() {
            let at = at + (index + 1) * 32;
            self.put(at, &(ticket << bpf::RING_TICKET_SHIFT | u64::from(*kind)).to_le_bytes());
            self.put(at + 8, &(!address).to_le_bytes());
            self.put(at + 16, &64u64.to_le_bytes());
        }
    }
}

#[derive(Default)]
struct Seen {
    admitted: Vec<usize>,
    events: Vec<(u32, Kind, u64)>,
    ended: HashMap<usize, Counts>,
    dead: Vec<u32>,
    threads_ended: Vec<u32>,
}

impl Receiver for Seen {
    fn announced(&mut self, announced: &Announced) {
        self.admitted.push(announced.entry);
    }
    fn replaced(&mut self, _: usize, _: &Counts) {}
    fn event(&mut self, _: usize, event: &Event) {
        self.events.push((event.tid, event.kind, event.addr.0));
    }
    fn stack(&mut self, _: usize, _: u32, _: &[u64], _: u8) {}
    fn thread_ended(&mut self, _: usize, tid: u32) {
        self.threads_ended.push(tid);
    }
    fn ended(&mut self, entry: usize, counts: &Counts) {
        self.ended.insert(entry, *counts);
    }
    fn is_thread(&mut self, _: usize, tid: u32) -> bool {
        !self.dead.contains(&tid)
    }
}

fn read(writer: &Writer, passes: usize, ends: bool) -> (Seen, Reader, Memory) {
    let memory = Memory::of_bytes(&writer.bytes);
    let (mut reader, mut seen) = (Reader::new(&memory), Seen::default());
    reader.pass(&memory, &mut seen, false);
    for entry in seen.admitted.clone() {
        reader.admit(entry);
        if ends {
            reader.end(entry);
        }
    }
    for _ in 0..passes {
        reader.pass(&memory, &mut seen, false);
    }
    (seen, reader, memory)
}

const ALLOC: u8 = bpf::RingKind::Alloc as u8;
const FREE: u8 = bpf::RingKind::Free as u8;

#[test]
fn events_of_several_threads_come_in_the_order_of_their_tickets() {
    let mut writer = Writer::new();
    writer.announce(0, 100);
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_OPEN, &[(0, ALLOC, 0x1000), (1, FREE, 0x1000), (4, FREE, 0x2000)]);
    writer.chunk(1, 0, 2, bpf::RING_CHUNK_OPEN, &[(2, ALLOC, 0x1000), (3, ALLOC, 0x2000)]);
    let (seen, reader, _) = read(&writer, 1, false);
    let order: Vec<(u32, u64)> = seen.events.iter().map(|(tid, _, addr)| (*tid, *addr)).collect();
    assert_eq!(order, [(1, 0x1000), (1, 0x1000), (2, 0x1000), (2, 0x2000), (1, 0x2000)]);
    assert_eq!(reader.malformed(), 0);
}

#[test]
fn an_event_that_is_not_written_yet_holds_up_the_later_ones_until_its_process_has_ended() {
    let mut writer = Writer::new();
    writer.announce(0, 100);
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_OPEN, &[(0, ALLOC, 0x1000), (2, FREE, 0x1000)]);
    let (seen, ..) = read(&writer, 3, false);
    assert_eq!(seen.events.len(), 1);
    let (seen, _, memory) = read(&writer, 3, true);
    assert_eq!(seen.events.len(), 2);
    assert_eq!(seen.ended[&0].abandoned, 1);
    // Its chunk and its entry are free again.
    assert_eq!(memory.state(0).load(std::sync::atomic::Ordering::Relaxed), 0);
}

#[test]
fn a_chunk_that_waited_for_an_event_when_its_process_ended_is_read_to_its_end() {
    let mut writer = Writer::new();
    writer.announce(0, 100);
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_OPEN, &[(1, ALLOC, 0x1000)]);
    let memory = Memory::of_bytes(&writer.bytes);
    let (mut reader, mut seen) = (Reader::new(&memory), Seen::default());
    reader.pass(&memory, &mut seen, false);
    reader.admit(0);
    reader.pass(&memory, &mut seen, false);
    // The missing event, and more, are written before the process ends.
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_OPEN, &[(1, ALLOC, 0x1000), (2, FREE, 0x1000), (3, FREE, 0x2000)]);
    writer.chunk(1, 0, 2, bpf::RING_CHUNK_OPEN, &[(0, ALLOC, 0x2000)]);
    let memory = Memory::of_bytes(&writer.bytes);
    reader.end(0);
    for _ in 0..3 {
        reader.pass(&memory, &mut seen, false);
    }
    assert_eq!((seen.events.len(), seen.ended[&0].abandoned), (4, 0));
}

#[test]
fn a_full_chunk_is_given_back_when_it_is_read_and_an_open_one_when_its_thread_has_ended() {
    let mut writer = Writer::new();
    writer.announce(0, 100);
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_FULL, &[(0, ALLOC, 0x1000)]);
    writer.chunk(1, 0, 2, bpf::RING_CHUNK_OPEN, &[(1, ALLOC, 0x2000)]);
    let (mut seen, mut reader, memory) = read(&writer, 2, false);
    let state = |chunk| memory.state(chunk).load(std::sync::atomic::Ordering::Relaxed) & 0xff;
    assert_eq!((state(0), state(1)), (bpf::RING_CHUNK_FREE, bpf::RING_CHUNK_OPEN));
    seen.dead = vec![2];
    reader.pass(&memory, &mut seen, true);
    assert_eq!((state(1), seen.threads_ended), (bpf::RING_CHUNK_FREE, vec![2]));
}

#[test]
fn what_has_no_meaning_is_counted_and_the_rest_of_its_chunk_skipped() {
    let mut writer = Writer::new();
    writer.announce(0, 100);
    writer.chunk(0, 0, 1, bpf::RING_CHUNK_OPEN, &[(0, ALLOC, 0x1000), (1, 99, 0), (2, FREE, 0x1000)]);
    // A chunk of nobody.
    writer.chunk(1, 77, 1, bpf::RING_CHUNK_OPEN, &[(0, ALLOC, 0x1000)]);
    let (seen, reader, _) = read(&writer, 2, false);
    assert_eq!(seen.events.len(), 1);
    assert_eq!(reader.malformed(), 2);
}
