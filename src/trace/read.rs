//! Reads a trace, one event after the other, in memory that does not depend on its length.

use std::io::{ErrorKind, Read};

use super::codec::{Bytes, State};
use super::event::Event;
use super::{Account, CONTENTS_BYTES_MAX, End, Header, Kind, MAGIC, Names, SEED_CHUNKS, SeedRegion, TraceError, Usage, VERSION};

/// Kind, payload bytes, contents bytes, checksum.
const HEAD_BYTES: usize = 1 + 4 + 4 + 4;

/// A part of a trace.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    /// An event.
    Event(Event),
    /// An account of the heap.
    Account(Account),
    /// The names of the stacks.
    Names(Names),
    /// Anonymous memory over time.
    Usage(Usage),
    /// A part of the heap from before the recording.
    Seed(Vec<SeedRegion>),
    /// The end.
    End(End),
}

/// Reads a trace from a stream.
pub struct Reader<R> {
    input: R,
    header: Header,
    state: State,
    /// Events of the current chunk, and how many of its bytes were decoded.
    contents: Vec<u8>,
    done: usize,
    /// Offset of the next chunk in the stream.
    at: u64,
    chunk_at: u64,
    has_ended: bool,
}

impl<R: Read> Reader<R> {
    /// Reads the header.
    ///
    /// # Errors
    /// If the stream is no trace, or one of another version.
    pub fn new(mut input: R) -> Result<Self, TraceError> {
        let mut magic = [0; 8];
        let found = fill(&mut input, &mut magic)?;
        if found < 8 || magic.get(..7) != Some(&MAGIC[..]) {
            return Err(TraceError::NotATrace);
        }
        if magic[7] != VERSION {
            return Err(TraceError::Version { found: magic[7] });
        }
        let mut reader = Self {
            input,
            header: Header::default(),
            state: State::default(),
            contents: Vec::new(),
            done: 0,
            at: 8,
            chunk_at: 8,
            has_ended: false,
        };
        match reader.chunk()? {
            Some((Kind::Header, contents)) => reader.header = reader.json(&contents)?,
            _ => return Err(reader.damaged("the header is missing")),
        }
        reader.state = State::at(reader.header.start_ns);
        Ok(reader)
    }

    /// What was recorded.
    #[must_use]
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Whether the end was read. If not, the trace was cut: what came before is valid.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The next part; `None` at the end, also of a trace that was cut.
    ///
    /// # Errors
    /// If the stream cannot be read, or a chunk is damaged.
    pub fn next_item(&mut self) -> Result<Option<Item>, TraceError> {
        loop {
            let mut bytes = Bytes(self.contents.get(self.done..).unwrap_or_default());
            let before = bytes.0.len();
            match self.state.decode(&mut bytes) {
                Ok(Some(event)) => {
                    self.done += before - bytes.0.len();
                    return Ok(Some(Item::Event(event)));
                }
                Ok(None) => {}
                Err(reason) => return Err(self.damaged(reason)),
            }
            if self.has_ended {
                return Ok(None);
            }
            let Some((kind, contents)) = self.chunk()? else { return Ok(None) };
            match kind {
                Kind::Header => return Err(self.damaged("there is a second header")),
                Kind::Events => (self.contents, self.done) = (contents, 0),
                Kind::Account => return Ok(Some(Item::Account(self.json(&contents)?))),
                Kind::Names => return Ok(Some(Item::Names(self.json(&contents)?))),
                Kind::Usage => return Ok(Some(Item::Usage(self.json(&contents)?))),
                Kind::Seed => return Ok(Some(Item::Seed(self.seed(&contents)?))),
                Kind::End => {
                    self.has_ended = true;
                    return Ok(Some(Item::End(self.json(&contents)?)));
                }
            }
        }
    }

    fn damaged(&self, reason: &'static str) -> TraceError {
        TraceError::Damaged { at: self.chunk_at, reason }
    }

    fn json<T: serde::de::DeserializeOwned>(&self, contents: &[u8]) -> Result<T, TraceError> {
        serde_json::from_slice(contents).map_err(|_| self.damaged("its JSON is not valid"))
    }

    fn seed(&self, contents: &[u8]) -> Result<Vec<SeedRegion>, TraceError> {
        let (mut bytes, mut regions, mut chunks) = (Bytes(contents), Vec::new(), 0);
        while !bytes.0.is_empty() {
            let region = SeedRegion::decode(&mut bytes).map_err(|reason| self.damaged(reason))?;
            chunks += region.chunks.len();
            if chunks > SEED_CHUNKS {
                return Err(self.damaged("it has too many chunks of the seed"));
            }
            regions.push(region);
        }
        Ok(regions)
    }

    /// The next chunk of a known kind; `None` where the stream ends, also in the middle of a chunk.
    fn chunk(&mut self) -> Result<Option<(Kind, Vec<u8>)>, TraceError> {
        loop {
            self.chunk_at = self.at;
            let mut head = [0; HEAD_BYTES];
            if fill(&mut self.input, &mut head)? < HEAD_BYTES {
                return Ok(None);
            }
            let number = |at: usize| head.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
            let (bytes, contents_bytes, checksum) = (number(1) as usize, number(5) as usize, number(9));
            // zstd's overhead on what cannot be compressed is below 1/256.
            if contents_bytes > CONTENTS_BYTES_MAX || bytes > contents_bytes + contents_bytes / 128 + 1024 {
                return Err(self.damaged("it is too large"));
            }
            let mut payload = Vec::new();
            let read = self.input.by_ref().take(bytes as u64).read_to_end(&mut payload)?;
            if read < bytes {
                return Ok(None);
            }
            self.at += (HEAD_BYTES + bytes) as u64;
            if crc32fast::hash(&payload) != checksum {
                return Err(self.damaged("its checksum is wrong"));
            }
            let Some(kind) = Kind::of(head[0]) else { continue };
            let contents = zstd::bulk::decompress(&payload, contents_bytes).map_err(|_| self.damaged("it cannot be decompressed"))?;
            if contents.len() != contents_bytes {
                return Err(self.damaged("its length is wrong"));
            }
            return Ok(Some((kind, contents)));
        }
    }
}

/// Reads until the buffer is full or the stream ends; returns the bytes read.
fn fill(input: &mut impl Read, buffer: &mut [u8]) -> Result<usize, TraceError> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match input.read(rest) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::super::event::{Op, Request};
    use super::super::{How, TICK_NS, Writer};
    use super::*;
    use crate::trace::NamesWriter;

    /// What a program does, without regard to whether it makes sense: blocks by a small number.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        Alloc(u64, u64, u64, How),
        Free(u64),
        Realloc(u64, u64, bool),
        Map(u64, u64),
        Lost(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0u64..40, any::<u64>(), 0u64..7, 0u8..13, any::<bool>()).prop_map(|(block, size, stack, alignment_bits, is_zeroed)| {
                Step::Alloc(block, size, stack, How { alignment_bits, is_zeroed })
            }),
            3 => (0u64..45).prop_map(Step::Free),
            1 => (0u64..40, 0u64..5000, any::<bool>()).prop_map(|(block, size, fails)| Step::Realloc(block, size, fails)),
            1 => (any::<u64>(), any::<u64>()).prop_map(|(addr, bytes)| Step::Map(addr, bytes)),
            1 => (1u64..9).prop_map(Step::Lost),
        ]
    }

    /// A trace of these steps, and the events that it must contain by a plain model.
    fn trace(steps: &[(u32, u64, Step)]) -> (Vec<u8>, Vec<Event>) {
        let header = Header { pid: 7, start_ns: 1_000_000, ..Header::default() };
        let mut out = Vec::new();
        let mut writer = Writer::new(&mut out, &header, u64::MAX).unwrap();
        let (mut now, mut events) = (header.start_ns, Vec::new());
        let (mut threads, mut stacks): (Vec<u32>, Vec<u64>) = Default::default();
        let (mut live, mut allocations): (HashMap<u64, u64>, u64) = Default::default();
        for &(tid, later, step) in steps {
            now += later;
            let number = |list: &mut Vec<u32>, one: u32| {
                list.iter().position(|&other| other == one).unwrap_or_else(|| {
                    list.push(one);
                    list.len() - 1
                }) as u32
            };
            let lost_by = threads.len().saturating_sub(1) as u32;
            let mut push = |thread: u32, op: Op| events.push(Event { thread, time_ns: now / TICK_NS * TICK_NS, op });
            let (addr, at) = (|block: u64| 0x1000 + block * 64, (tid, now));
            let mut request = |stack: u64, size_bytes: u64, alignment_bits: u8, is_zeroed: bool| {
                let stack = stacks.iter().position(|&other| other == stack).unwrap_or_else(|| {
                    stacks.push(stack);
                    stacks.len() - 1
                }) as u32;
                Request { stack, size_bytes, alignment_bits, is_zeroed }
            };
            match step {
                Step::Alloc(block, size, stack, how) => {
                    writer.alloc(at, addr(block), stack, size, how).unwrap();
                    let thread = number(&mut threads, tid);
                    if let Some(block) = live.insert(block, allocations) {
                        push(thread, Op::Free { block });
                    }
                    push(thread, Op::Alloc(request(stack, size, how.alignment_bits, how.is_zeroed)));
                    allocations += 1;
                }
                Step::Free(block) => {
                    writer.free(at, addr(block)).unwrap();
                    let known = live.remove(&block);
                    push(number(&mut threads, tid), known.map_or(Op::FreeUnknown { addr: addr(block) }, |block| Op::Free { block }));
                }
                Step::Realloc(block, size, fails) => {
                    writer.realloc_free(at, addr(block)).unwrap();
                    let (thread, known) = (number(&mut threads, tid), live.remove(&block));
                    push(thread, known.map_or(Op::ReallocFreeUnknown { addr: addr(block) }, |block| Op::ReallocFree { block }));
                    if fails {
                        writer.realloc_fail(tid, addr(block)).unwrap();
                        if let Some(number) = known {
                            live.insert(block, number);
                            push(thread, Op::ReallocFail { block: number });
                        }
                    } else {
                        writer.alloc(at, addr(block), 3, size, How::default()).unwrap();
                        live.insert(block, allocations);
                        push(thread, Op::Alloc(request(3, size, 0, false)));
                        allocations += 1;
                    }
                }
                Step::Map(addr, bytes) => {
                    let op = Op::Map { addr, bytes, is_writable: bytes % 2 == 0 };
                    writer.other(at, op).unwrap();
                    push(number(&mut threads, tid), op);
                }
                Step::Lost(records) if !threads.is_empty() => {
                    writer.lost(records).unwrap();
                    // At the time of the last event.
                    let time_ns = events.last().map_or(0, |last: &Event| last.time_ns);
                    events.push(Event { thread: lost_by, time_ns, op: Op::Lost { records } });
                    now -= later;
                }
                Step::Lost(_) => now -= later,
            }
        }
        let mut names = NamesWriter::default();
        let main = names.function("main".into());
        names.stack(&[main]);
        let names = names.finish();
        writer.account(&Account { time_ns: now, ..Account::default() }).unwrap();
        let (end, _) = writer.finish(&names, &[]).unwrap();
        assert_eq!(end.events as usize, events.len());
        (out, events)
    }

    fn steps() -> impl Strategy<Value = Vec<(u32, u64, Step)>> {
        proptest::collection::vec((0u32..4, prop_oneof![0u64..20_000, 0u64..u64::from(u32::MAX)], step()), 0..200)
    }

    fn read(bytes: &[u8]) -> Result<(Vec<Event>, bool), TraceError> {
        let mut reader = Reader::new(bytes)?;
        let mut events = Vec::new();
        while let Some(item) = reader.next_item()? {
            if let Item::Event(event) = item {
                events.push(event);
            }
        }
        Ok((events, reader.has_ended()))
    }

    /// Accounts write out the events before them, so that no chunk of these is ever complete.
    #[test]
    fn a_trace_ends_at_its_limit_however_often_its_events_are_written_out() {
        let mut out = Vec::new();
        let mut writer = Writer::new(&mut out, &Header::default(), 4096).unwrap();
        for block in 1..5000 {
            writer.alloc((1, block), block << 4, block, block, How::default()).unwrap();
            if block % 10 == 0 {
                writer.account(&Account::default()).unwrap();
            }
        }
        let end = writer.finish(&NamesWriter::default().finish(), &[]).unwrap().0;
        assert_eq!(end.cut_short, "the file has 0 MiB, its limit");
        assert_eq!(read(&out).unwrap().0.len() as u64, end.events);
        assert!(end.events < 1000, "{} events", end.events);
    }

    proptest! {
        #[test]
        fn what_was_written_is_read(steps in steps()) {
            let (bytes, events) = trace(&steps);
            prop_assert_eq!(read(&bytes).unwrap(), (events, true));
        }

        #[test]
        fn a_trace_that_was_cut_is_a_prefix_or_refused(steps in steps(), cut in any::<prop::sample::Index>()) {
            let (bytes, events) = trace(&steps);
            let cut = &bytes[..cut.index(bytes.len())];
            if let Ok((found, has_ended)) = read(cut) {
                prop_assert!(!has_ended && events.starts_with(&found));
            }
        }

        #[test]
        fn a_damaged_trace_is_refused_or_differs_in_nothing(
            steps in steps(), at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let (mut bytes, events) = trace(&steps);
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            if let Ok((found, _)) = read(&bytes) {
                // A kind or a length is not in the checksum: chunks may be missing.
                prop_assert!(events.starts_with(&found) || found.len() < events.len());
            }
        }

        #[test]
        fn any_bytes_are_events_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let (mut state, mut bytes) = (State::at(0), Bytes(&bytes));
            for _ in 0..1000 {
                match state.decode(&mut bytes) {
                    Ok(Some(_)) => {}
                    Ok(None) | Err(_) => break,
                }
            }
        }
    }

    #[test]
    fn a_stream_that_is_no_trace_or_of_another_version_is_refused() {
        assert!(matches!(read(b"FPTRAC"), Err(TraceError::NotATrace)));
        assert!(matches!(read(b"\x7fELF\0\0\0\0\0\0"), Err(TraceError::NotATrace)));
        assert!(matches!(read(b"FPTRACE\x01"), Err(TraceError::Version { found: 1 })));
        let (bytes, _) = trace(&[]);
        let mut large = bytes.clone();
        large[13..17].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(read(&large), Err(TraceError::Damaged { at: 8, .. })));
    }
}
