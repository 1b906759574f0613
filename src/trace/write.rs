//! Writes a trace.

use std::collections::HashMap;
use std::io::{self, Write};

use super::codec::State;
use super::event::{Event, Op, Request};
use super::{Account, CHUNK_BYTES, End, Header, Kind, MAGIC, Names, VERSION};

/// Requests that are numbered at a time, 16 bytes each on both sides; then all are forgotten.
const REQUESTS_MAX: usize = 1 << 20;
/// zstd's level: higher ones save a tenth and take several times as long.
const LEVEL: i32 = 1;

/// Writes a trace of one process into a stream.
pub struct Writer<W: Write> {
    out: W,
    state: State,
    contents: Vec<u8>,
    requests: HashMap<Request, u32>,
    /// By hash.
    stacks: HashMap<u64, u32>,
    /// By thread id.
    threads: HashMap<u32, u32>,
    /// Live blocks by address.
    blocks: HashMap<u64, u64>,
    /// By thread: the block that its realloc took, with its address.
    reallocs: HashMap<u32, (u64, u64)>,
    start_ns: u64,
    last_ns: u64,
    written: u64,
    bytes_max: u64,
    end: End,
}

impl<W: Write> Writer<W> {
    /// Writes the header. No event is written once the file has `bytes_max` bytes.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn new(mut out: W, header: &Header, bytes_max: u64) -> io::Result<Self> {
        out.write_all(&MAGIC)?;
        out.write_all(&[VERSION])?;
        let mut writer = Self {
            out,
            state: State::at(header.start_ns),
            contents: Vec::with_capacity(CHUNK_BYTES + 64),
            requests: HashMap::new(),
            stacks: HashMap::new(),
            threads: HashMap::new(),
            blocks: HashMap::new(),
            reallocs: HashMap::new(),
            start_ns: header.start_ns,
            last_ns: header.start_ns,
            written: 8,
            bytes_max,
            end: End::default(),
        };
        writer.chunk(Kind::Header, &serde_json::to_vec(header)?)?;
        Ok(writer)
    }

    /// A block was allocated. `stack`: the hash of the calling stack.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn alloc(&mut self, (tid, time_ns): (u32, u64), addr: u64, stack: u64, size_bytes: u64, alignment_bits: u8) -> io::Result<()> {
        let thread = self.thread(tid);
        self.reallocs.remove(&thread);
        if let Some(block) = self.blocks.remove(&addr) {
            // Its free was lost.
            self.end.lost += 1;
            self.push(thread, time_ns, Op::Free { block })?;
        }
        let next = self.stacks.len() as u32;
        let stack = *self.stacks.entry(stack).or_insert(next);
        self.end.allocations += 1;
        self.blocks.insert(addr, self.state.next_block());
        self.push(thread, time_ns, Op::Alloc(Request { stack, size_bytes, alignment_bits }))
    }

    /// A block is about to be freed.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn free(&mut self, (tid, time_ns): (u32, u64), addr: u64) -> io::Result<()> {
        let thread = self.thread(tid);
        self.end.frees += 1;
        let op = self.blocks.remove(&addr).map_or(Op::FreeUnknown { addr }, |block| Op::Free { block });
        self.push(thread, time_ns, op)
    }

    /// A realloc takes a block.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn realloc_free(&mut self, (tid, time_ns): (u32, u64), addr: u64) -> io::Result<()> {
        let thread = self.thread(tid);
        self.end.frees += 1;
        let op = match self.blocks.remove(&addr) {
            Some(block) => {
                self.reallocs.insert(thread, (addr, block));
                Op::ReallocFree { block }
            }
            None => Op::ReallocFreeUnknown { addr },
        };
        self.push(thread, time_ns, op)
    }

    /// The thread's realloc of the block failed.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn realloc_fail(&mut self, tid: u32, addr: u64) -> io::Result<()> {
        let thread = self.thread(tid);
        let Some((_, block)) = self.reallocs.remove(&thread).filter(|taken| taken.0 == addr) else { return Ok(()) };
        self.blocks.insert(addr, block);
        self.end.frees -= 1;
        self.push(thread, self.last_ns, Op::ReallocFail { block })
    }

    /// An event that concerns no block: [`Op::Map`], [`Op::Unmap`], [`Op::Break`].
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn other(&mut self, (tid, time_ns): (u32, u64), op: Op) -> io::Result<()> {
        let thread = self.thread(tid);
        self.push(thread, time_ns, op)
    }

    /// The process replaced its image. The end counts what follows only.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn exec(&mut self, (tid, time_ns): (u32, u64)) -> io::Result<()> {
        self.blocks.clear();
        self.reallocs.clear();
        (self.end.allocations, self.end.frees, self.end.lost) = (0, 0, 0);
        let thread = self.thread(tid);
        self.push(thread, time_ns, Op::Exec)
    }

    /// Records were lost before now.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn lost(&mut self, records: u64) -> io::Result<()> {
        self.end.lost += records;
        self.push(self.state.next_thread().saturating_sub(1), self.last_ns, Op::Lost { records })
    }

    /// The account of a census.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn account(&mut self, account: &Account) -> io::Result<()> {
        self.flush()?;
        self.chunk(Kind::Account, &serde_json::to_vec(account)?)
    }

    /// The hashes of the stacks so far, in the order of their numbers.
    #[must_use]
    pub fn stacks(&self) -> Vec<u64> {
        let mut stacks: Vec<(u32, u64)> = self.stacks.iter().map(|(&hash, &number)| (number, hash)).collect();
        stacks.sort_unstable();
        stacks.into_iter().map(|(_, hash)| hash).collect()
    }

    /// No further event is written, for this reason.
    fn cut(&mut self, reason: &str) {
        if self.end.cut_short.is_empty() {
            reason.clone_into(&mut self.end.cut_short);
        }
    }

    /// Ends the trace, and returns what it contains and its bytes.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn finish(mut self, names: &Names) -> io::Result<(End, u64)> {
        self.flush()?;
        self.chunk(Kind::Names, &serde_json::to_vec(names)?)?;
        self.end.duration_ns = self.last_ns - self.start_ns;
        let end = serde_json::to_vec(&self.end)?;
        self.chunk(Kind::End, &end)?;
        self.out.flush()?;
        Ok((self.end, self.written))
    }

    fn thread(&mut self, tid: u32) -> u32 {
        let next = self.threads.len() as u32;
        *self.threads.entry(tid).or_insert(next)
    }

    fn push(&mut self, thread: u32, time_ns: u64, op: Op) -> io::Result<()> {
        if !self.end.cut_short.is_empty() {
            return Ok(());
        }
        self.last_ns = self.last_ns.max(time_ns);
        if self.requests.len() >= REQUESTS_MAX {
            self.requests.clear();
            self.encode(thread, Op::ForgetRequests, 0);
        }
        let number = match op {
            Op::Alloc(request) => {
                let next = self.requests.len() as u32;
                *self.requests.entry(request).or_insert(next)
            }
            _ => 0,
        };
        self.encode(thread, op, number);
        if self.contents.len() >= CHUNK_BYTES {
            self.flush()?;
            if self.written >= self.bytes_max {
                self.cut(&format!("the file has {} MiB, its limit", self.written >> 20));
            }
        }
        Ok(())
    }

    fn encode(&mut self, thread: u32, op: Op, request: u32) {
        self.end.events += 1;
        let event = Event { thread, time_ns: self.last_ns, op };
        self.state.encode(&mut self.contents, &event, request);
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.contents.is_empty() {
            return Ok(());
        }
        let mut contents = std::mem::take(&mut self.contents);
        let done = self.chunk(Kind::Events, &contents);
        contents.clear();
        self.contents = contents;
        done
    }

    fn chunk(&mut self, kind: Kind, contents: &[u8]) -> io::Result<()> {
        let payload = zstd::bulk::compress(contents, LEVEL)?;
        let length = |bytes: usize| u32::try_from(bytes).map_err(|_| io::Error::other("a chunk is too large"));
        let mut head = vec![kind as u8];
        for number in [length(payload.len())?, length(contents.len())?, crc32fast::hash(&payload)] {
            head.extend_from_slice(&number.to_le_bytes());
        }
        self.out.write_all(&head)?;
        self.out.write_all(&payload)?;
        self.written += (head.len() + payload.len()) as u64;
        Ok(())
    }
}
