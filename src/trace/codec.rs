//! Numbers in 1 to 10 bytes (LEB128), and events as bytes. Pure.

use super::TICK_NS;
use super::event::{Event, Op, Request};

/// The thread is that of the last event.
const SAME_THREAD: u8 = 1 << 4;
/// The time is that of the last event.
const SAME_TIME: u8 = 1 << 5;
/// The block was allocated before the recording, or its allocation was lost: its address follows.
const BY_ADDRESS: u8 = 1 << 6;

/// Of the byte with a request's alignment: the block is to be zeros.
const ZEROED: u8 = 1 << 7;

/// Appends a number, 7 bits a byte, the lowest first.
pub fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Bytes that are read from the front.
#[derive(Debug, Clone, Copy)]
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    /// The next byte; `None` at the end.
    pub fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(first)
    }

    /// The next number; `None` if it is cut or has more than 64 bits.
    pub fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }
}

/// What both sides remember of the events so far: they must do the same with each event.
#[derive(Debug, Default)]
pub struct State {
    thread: u32,
    ticks: u64,
    /// Threads so far; a new one has this number.
    threads: u32,
    /// Requests so far.
    pub requests: Vec<Request>,
    /// Stacks so far.
    stacks: u32,
    /// Allocations so far.
    allocations: u64,
}

impl State {
    /// The state at a start time on the clock of the events.
    #[must_use]
    pub fn at(start_ns: u64) -> Self {
        Self { ticks: start_ns / TICK_NS, ..Self::default() }
    }

    /// Stacks that occurred so far.
    #[must_use]
    pub fn stacks(&self) -> u32 {
        self.stacks
    }

    /// Appends an event. `request`: the number of the event's request, or that of the next one if it is new.
    pub fn encode(&mut self, out: &mut Vec<u8>, event: &Event, request: u32) {
        let ticks = (event.time_ns / TICK_NS).max(self.ticks);
        let mut head = event.op.number();
        head |= if event.thread == self.thread && self.threads > 0 { SAME_THREAD } else { 0 };
        head |= if ticks == self.ticks { SAME_TIME } else { 0 };
        let by_address = matches!(event.op, Op::FreeUnknown { .. } | Op::ReallocFreeUnknown { .. });
        out.push(head | if by_address { BY_ADDRESS } else { 0 });
        if head & SAME_THREAD == 0 {
            put(out, event.thread.into());
        }
        if head & SAME_TIME == 0 {
            put(out, ticks - self.ticks);
        }
        match event.op {
            Op::Alloc(new) => {
                put(out, request.into());
                if request as usize == self.requests.len() {
                    put(out, new.stack.into());
                    put(out, new.size_bytes);
                    out.push(new.alignment_bits | if new.is_zeroed { ZEROED } else { 0 });
                }
            }
            Op::Free { block } | Op::ReallocFree { block } | Op::ReallocFail { block } => {
                put(out, self.allocations.wrapping_sub(1).wrapping_sub(block));
            }
            Op::FreeUnknown { addr } | Op::ReallocFreeUnknown { addr } => put(out, addr),
            Op::Map { addr, bytes, is_writable } => {
                put(out, addr);
                put(out, bytes);
                out.push(is_writable.into());
            }
            Op::Unmap { addr, bytes } => {
                put(out, addr);
                put(out, bytes);
            }
            Op::Break { end } => put(out, end),
            Op::Lost { records } => put(out, records),
            Op::ThreadEnd | Op::ForgetRequests | Op::Exec => {}
        }
        self.advance(event, ticks, request);
    }

    /// The next event; `Ok(None)` at the end of the bytes.
    ///
    /// # Errors
    /// If the bytes are not a sequence of events.
    pub fn decode(&mut self, bytes: &mut Bytes<'_>) -> Result<Option<Event>, &'static str> {
        const CUT: &str = "an event is cut";
        let Some(head) = bytes.byte() else { return Ok(None) };
        let thread = if head & SAME_THREAD != 0 {
            self.thread
        } else {
            u32::try_from(bytes.number().ok_or(CUT)?).map_err(|_| "a thread number is too large")?
        };
        if thread > self.threads || head & SAME_THREAD != 0 && self.threads == 0 {
            return Err("a thread occurs before its number is due");
        }
        let delta = if head & SAME_TIME != 0 { 0 } else { bytes.number().ok_or(CUT)? };
        let ticks = self.ticks.checked_add(delta).ok_or("a time is too late")?;
        let time_ns = ticks.checked_mul(TICK_NS).ok_or("a time is too late")?;
        let mut request = 0;
        let number = |bytes: &mut Bytes<'_>| bytes.number().ok_or(CUT);
        let by_address = head & BY_ADDRESS != 0;
        let allocations = self.allocations;
        let block = |distance: u64| {
            let known = allocations.checked_sub(1).and_then(|last| last.checked_sub(distance));
            known.ok_or("a block is named before it is allocated")
        };
        let op = match head & 0xf {
            0 => {
                request = u32::try_from(number(bytes)?).map_err(|_| "a request's number is too large")?;
                Op::Alloc(match self.requests.get(request as usize) {
                    Some(&known) => known,
                    None if request as usize == self.requests.len() => {
                        let stack = u32::try_from(number(bytes)?).map_err(|_| "a stack's number is too large")?;
                        if stack > self.stacks {
                            return Err("a stack occurs before its number is due");
                        }
                        let size_bytes = number(bytes)?;
                        let how = bytes.byte().ok_or(CUT)?;
                        let (alignment_bits, is_zeroed) = (how & !ZEROED, how & ZEROED != 0);
                        if alignment_bits >= 64 {
                            return Err("an alignment is too large");
                        }
                        Request { stack, size_bytes, alignment_bits, is_zeroed }
                    }
                    None => return Err("a request occurs before its number is due"),
                })
            }
            1 if by_address => Op::FreeUnknown { addr: number(bytes)? },
            1 => Op::Free { block: block(number(bytes)?)? },
            2 if by_address => Op::ReallocFreeUnknown { addr: number(bytes)? },
            2 => Op::ReallocFree { block: block(number(bytes)?)? },
            3 => Op::ReallocFail { block: block(number(bytes)?)? },
            4 => {
                let (addr, length) = (number(bytes)?, number(bytes)?);
                Op::Map { addr, bytes: length, is_writable: bytes.byte().ok_or(CUT)? != 0 }
            }
            5 => Op::Unmap { addr: number(bytes)?, bytes: number(bytes)? },
            6 => Op::Break { end: number(bytes)? },
            7 => Op::Lost { records: number(bytes)? },
            8 => Op::ThreadEnd,
            9 => Op::ForgetRequests,
            10 => Op::Exec,
            _ => return Err("an event is of an unknown kind"),
        };
        let event = Event { thread, time_ns, op };
        self.advance(&event, ticks, request);
        Ok(Some(event))
    }

    fn advance(&mut self, event: &Event, ticks: u64, request: u32) {
        (self.thread, self.ticks) = (event.thread, ticks);
        self.threads = self.threads.max(event.thread.saturating_add(1));
        match event.op {
            Op::Alloc(new) => {
                self.allocations += 1;
                if request as usize == self.requests.len() {
                    self.requests.push(new);
                    self.stacks = self.stacks.max(new.stack.saturating_add(1));
                }
            }
            Op::ForgetRequests => self.requests.clear(),
            _ => {}
        }
    }

    /// Number of the next allocation.
    #[must_use]
    pub fn next_block(&self) -> u64 {
        self.allocations
    }

    /// Number of a thread that has not occurred yet.
    #[must_use]
    pub fn next_thread(&self) -> u32 {
        self.threads
    }
}
