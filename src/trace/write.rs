//! Writes a trace.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use super::codec::State;
use super::event::{Event, How, Op, Request};
use super::{Account, CHUNK_BYTES, End, Header, Kind, MAGIC, Names, SEED_CHUNKS, Seed, SeedRegion, Usage, VERSION};

/// Requests that are numbered at a time, 16 bytes each on both sides; then all are forgotten.
const REQUESTS_MAX: usize = 1 << 20;
/// Addresses of blocks that were allocated and freed before the seed is known, at most: 64 MiB. With more there is no seed.
const FREED_MAX: usize = 1 << 22;
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
    threads_seen: u32,
    /// Live blocks by address.
    blocks: HashMap<u64, u64>,
    /// By thread: the block that its realloc took, with its address.
    reallocs: HashMap<u32, (u64, u64)>,
    start_ns: u64,
    last_ns: u64,
    /// When the process or the recording ended, if that is known.
    end_ns: u64,
    written: u64,
    bytes_max: u64,
    end: End,
    before: Before,
}

/// What is known of the heap from before the recording.
enum Before {
    /// There is none.
    Nothing,
    /// It is not known yet. Addresses of blocks that were allocated since the beginning and freed.
    Awaited(HashSet<u64>),
    /// It is written. Its regions without their chunks, by address, and the arenas of threads.
    Known(Vec<(std::ops::Range<u64>, u32)>, HashMap<u32, u32>),
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
            threads_seen: 0,
            blocks: HashMap::new(),
            reallocs: HashMap::new(),
            start_ns: header.start_ns,
            last_ns: header.start_ns,
            end_ns: 0,
            written: 8,
            bytes_max,
            end: End::default(),
            before: if header.is_from_start { Before::Nothing } else { Before::Awaited(HashSet::new()) },
        };
        writer.chunk(Kind::Header, &serde_json::to_vec(header)?)?;
        Ok(writer)
    }

    /// A block was allocated. `stack`: the hash of the calling stack.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn alloc(&mut self, (tid, time_ns): (u32, u64), addr: u64, stack: u64, size_bytes: u64, how: How) -> io::Result<()> {
        let How { alignment_bits, is_zeroed } = how;
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
        self.place(thread, addr);
        self.push(thread, time_ns, Op::Alloc(Request { stack, size_bytes, alignment_bits, is_zeroed }))
    }

    /// A block is about to be freed.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn free(&mut self, (tid, time_ns): (u32, u64), addr: u64) -> io::Result<()> {
        let thread = self.thread(tid);
        self.end.frees += 1;
        let op = self.blocks.remove(&addr).map_or(Op::FreeUnknown { addr }, |block| Op::Free { block });
        self.was_freed(addr, matches!(op, Op::Free { .. }));
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
        self.was_freed(addr, matches!(op, Op::ReallocFree { .. }));
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
        self.before = Before::Nothing;
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

    /// The heap from before the recording, by a census that began after the first event and ended before now. Blocks that are not from
    /// before are left out. Ignored if the recording has seen the process from its start, or the seed is written or given up. It ends where
    /// the file has `bytes_max` bytes.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn seed(&mut self, seed: &Seed) -> io::Result<()> {
        let Before::Awaited(freed) = &mut self.before else { return Ok(()) };
        let freed = std::mem::take(freed);
        let spans = seed.regions.iter().filter_map(|region| Some((region.range(), region.arena?)));
        self.before = Before::Known(spans.collect(), HashMap::new());
        self.flush()?;
        for region in &seed.regions {
            for part in region.chunks.chunks(SEED_CHUNKS) {
                if self.is_full() {
                    "the file was full".clone_into(&mut self.end.no_seed);
                    return Ok(());
                }
                let is_from_before = |addr: &u64| !self.blocks.contains_key(addr) && !freed.contains(addr);
                let chunks = part.iter().filter(|chunk| chunk.free.is_some() || is_from_before(&chunk.addr));
                let from_before = SeedRegion { arena: region.arena, chunks: chunks.copied().collect() };
                if !from_before.chunks.is_empty() {
                    let mut contents = Vec::new();
                    from_before.encode(&mut contents);
                    self.chunk(Kind::Seed, &contents)?;
                }
            }
        }
        Ok(())
    }

    /// There will be no seed, for this reason. Ignored if none is awaited.
    pub fn without_seed(&mut self, reason: &str) {
        if matches!(self.before, Before::Awaited(_)) {
            reason.clone_into(&mut self.end.no_seed);
            self.before = Before::Nothing;
        }
    }

    /// A block was freed; `is_known`: it had been allocated during the recording.
    fn was_freed(&mut self, addr: u64, is_known: bool) {
        if let Before::Awaited(freed) = &mut self.before
            && is_known
        {
            freed.insert(addr);
            if freed.len() > FREED_MAX {
                self.without_seed("the process had freed too many new blocks by the end of the census");
            }
        }
    }

    /// A thread was given a block here: that tells its arena.
    fn place(&mut self, thread: u32, addr: u64) {
        if let Before::Known(regions, arenas) = &mut self.before
            && !arenas.contains_key(&thread)
            && let Some((range, arena)) = regions.get(regions.partition_point(|(range, _)| range.start <= addr).wrapping_sub(1))
            && range.contains(&addr)
        {
            arenas.insert(thread, *arena);
        }
    }

    /// The process's anonymous memory over time.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn usage(&mut self, usage: &Usage) -> io::Result<()> {
        self.flush()?;
        self.chunk(Kind::Usage, &serde_json::to_vec(usage)?)
    }

    /// The thread ended: its number in the kernel may be another's from now on.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn thread_end(&mut self, (tid, time_ns): (u32, u64)) -> io::Result<()> {
        let Some(thread) = self.threads.remove(&tid) else { return Ok(()) };
        self.reallocs.remove(&thread);
        self.push(thread, time_ns, Op::ThreadEnd)
    }

    /// The process, or its recording, ended then: maybe long after the last event. The first time counts.
    pub fn ended(&mut self, time_ns: u64) {
        if self.end_ns == 0 {
            self.end_ns = time_ns;
        }
    }

    /// Live blocks.
    #[must_use]
    pub fn live(&self) -> usize {
        self.blocks.len()
    }

    /// The process ended then.
    pub fn exited(&mut self, time_ns: u64) {
        self.end.has_exited |= self.end_ns == 0;
        self.ended(time_ns);
    }

    /// The number of a stack that an event had.
    #[must_use]
    pub fn stack_number(&self, hash: u64) -> Option<u32> {
        self.stacks.get(&hash).copied()
    }

    /// The hashes of the stacks so far, in the order of their numbers.
    #[must_use]
    pub fn stacks(&self) -> Vec<u64> {
        let mut stacks: Vec<(u32, u64)> = self.stacks.iter().map(|(&hash, &number)| (number, hash)).collect();
        stacks.sort_unstable();
        stacks.into_iter().map(|(_, hash)| hash).collect()
    }

    /// Ends the trace, and returns what it contains and its bytes.
    ///
    /// # Errors
    /// If the stream refuses.
    pub fn finish(mut self, names: &Names, allocators: &[String]) -> io::Result<(End, u64)> {
        self.flush()?;
        self.chunk(Kind::Names, &serde_json::to_vec(names)?)?;
        let end_ns = if self.end.cut_short.is_empty() { self.last_ns.max(self.end_ns) } else { self.last_ns };
        self.end.duration_ns = end_ns - self.start_ns;
        self.end.allocators = allocators.to_vec();
        if let Before::Known(_, arenas) = &self.before {
            self.end.arenas = arenas.iter().map(|(&thread, &arena)| (thread, arena)).collect();
            self.end.arenas.sort_unstable();
        }
        let end = serde_json::to_vec(&self.end)?;
        self.chunk(Kind::End, &end)?;
        self.out.flush()?;
        Ok((self.end, self.written))
    }

    fn thread(&mut self, tid: u32) -> u32 {
        *self.threads.entry(tid).or_insert_with(|| {
            self.threads_seen += 1;
            self.threads_seen - 1
        })
    }

    fn push(&mut self, thread: u32, time_ns: u64, op: Op) -> io::Result<()> {
        if self.is_full() {
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
        }
        Ok(())
    }

    /// Whether the file has reached its limit; then the trace ends here.
    fn is_full(&mut self) -> bool {
        let is_full = self.written >= self.bytes_max;
        if is_full && self.end.cut_short.is_empty() {
            self.end.cut_short = format!("the file has {} MiB, its limit", self.written >> 20);
        }
        is_full
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
