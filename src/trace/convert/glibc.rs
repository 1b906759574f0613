//! Traces of glibc's allocator: the records of its tracer and the workloads of its simulator (glibc-malloc-trace-utils: mtrace.h,
//! trace2wl.c, trace_run.c), and the text of `mtrace(3)` (malloc/mtrace-impl.c).
//!
//! A record has 64 bytes: thread, type and path flags (4 bytes each), two pointers, size, two further sizes, padding. A workload is a
//! program of one-byte codes with numbers of 7 bits a byte, the highest first; each thread has its own, and threads wait for each other at
//! numbered points. Both without times and stacks.

use std::collections::{HashMap, HashSet};
use std::io::{Read, Write};

use super::lines::{Lines, hex};
use super::{ConvertError, Converted, Header, How, Input, NAME_BYTES_MAX, Names, NamesWriter, Options, Output, WHOLE_BYTES_MAX};
use crate::trace::{NO_THREADS, NO_TIMES, TICK_NS};

const RECORD_BYTES: usize = 64;
/// Of a record: the file's first one (`__MTB_TYPE_MAGIC`), with this pointer.
const MAGIC: u8 = 255;
const MAGIC_POINTER: u64 = 0x1234;
/// Allocations of addresses whose free is recorded later, at most.
const INVERTED_MAX: usize = 1 << 20;
const ALLOCATOR: &str = "glibc in libc.so.6";
const LACKS_STACKS: &str = "stacks";
const LACKS_ORDER: &str = "the order of threads between the points at which they wait for each other";
/// Threads of a workload at most.
const THREADS_MAX: u64 = 1 << 16;
/// Calls of a thread in a row, unless it waits.
const TURN: usize = 16;
/// Bytes of all callers' texts at most, each with its entry in the table.
const CALLER_BYTES_MAX: usize = 256 << 20;
/// See [`CALLER_BYTES_MAX`].
const ENTRY_BYTES: usize = 48;
/// log2 of the alignment of `valloc`: a page.
const PAGE_BITS: u8 = 12;

/// Events one unit of time apart.
struct Clock(u64);

impl Clock {
    fn next_ns(&mut self) -> u64 {
        self.0 = self.0.saturating_add(TICK_NS);
        self.0
    }
}

fn word(record: &[u8], at: usize) -> u64 {
    record.get(at..at + 8).and_then(|bytes| bytes.try_into().ok()).map_or(0, u64::from_le_bytes)
}

/// log2 of an alignment; 0 for one that is none.
fn bits(alignment: u64) -> u8 {
    if alignment.is_power_of_two() { alignment.trailing_zeros() as u8 } else { 0 }
}

fn aligned(alignment_bits: u8) -> How {
    How { alignment_bits, is_zeroed: false }
}

const ZEROED: How = How { alignment_bits: 0, is_zeroed: true };

/// Whether a file begins with the first record of the tracer.
pub(super) fn is_records(first: &[u8]) -> bool {
    first.get(4) == Some(&MAGIC) && word(first, 8) == MAGIC_POINTER
}

/// Converts the records of glibc's tracer. An allocation may be recorded before the free of the same address: it then waits for it.
pub(super) fn records<W: Write, R: Read>(mut input: Input<R>, out: W, options: &Options) -> Result<Converted, ConvertError> {
    let header = Header { is_from_start: true, allocators: vec![ALLOCATOR.into()], page_bytes: 4096, ..Header::default() };
    let mut output = Output::new(out, header, "the records of glibc's malloc tracer", &[NO_TIMES, LACKS_STACKS], options)?;
    let (mut clock, mut live, mut inverted) = (Clock(0), HashSet::<u64>::new(), HashMap::<u64, (u32, u64, How)>::new());
    let mut record = [0; RECORD_BYTES];
    loop {
        let mut done = 0;
        while let Some(rest) = record.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match input.read(rest)? {
                0 => break,
                read => done += read,
            }
        }
        if done < RECORD_BYTES {
            break;
        }
        // Thread ids are not negative; 0 would be no thread.
        let thread = record.get(..4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
        let (old, new, size, alignment) = (word(&record, 8), word(&record, 16), word(&record, 24), word(&record, 32));
        let how = match record[4] {
            2 => ZEROED,
            5 | 8 => aligned(bits(alignment)),
            6 | 7 => aligned(PAGE_BITS),
            _ => How::default(),
        };
        match record[4] {
            0 | MAGIC => {}
            // The first pointer of posix_memalign is its status.
            8 if old != 0 => {}
            1 | 2 | 5..=8 if new != 0 => {
                if live.contains(&new) && inverted.len() < INVERTED_MAX {
                    inverted.insert(new, (thread, size, how));
                    continue;
                }
                live.insert(new);
                output.alloc((thread, clock.next_ns()), new, 0, size, how)?;
            }
            3 if old != 0 => {
                let at = (thread, clock.next_ns());
                live.remove(&old);
                output.free(at, old)?;
                if let Some((thread, size, how)) = inverted.remove(&old) {
                    live.insert(old);
                    output.alloc((thread, clock.next_ns()), old, 0, size, how)?;
                }
            }
            4 => {
                live.remove(&old);
                if new != 0 {
                    live.insert(new);
                }
                output.realloc((thread, clock.next_ns()), old, (new != 0).then_some(new), (0, size))?;
            }
            1..=8 => {}
            _ => output.skipped += 1,
        }
    }
    for (addr, (thread, size, how)) in inverted {
        output.alloc((thread, clock.next_ns()), addr, 0, size, how)?;
    }
    output.finish(&Names::default(), &[ALLOCATOR.to_owned()], Some(clock.0))
}

/// Codes of a workload.
mod code {
    pub(super) const NOP: u8 = 0;
    pub(super) const DONE: u8 = 1;
    pub(super) const MALLOC: u8 = 2;
    pub(super) const CALLOC: u8 = 3;
    pub(super) const REALLOC: u8 = 4;
    pub(super) const FREE: u8 = 5;
    pub(super) const SYNC_W: u8 = 6;
    pub(super) const SYNC_R: u8 = 7;
    pub(super) const ALLOC_PTRS: u8 = 8;
    pub(super) const ALLOC_SYNCS: u8 = 9;
    pub(super) const NTHREADS: u8 = 10;
    pub(super) const START_THREAD: u8 = 11;
    pub(super) const MEMALIGN: u8 = 12;
    pub(super) const VALLOC: u8 = 13;
    pub(super) const PVALLOC: u8 = 14;
    pub(super) const POSIX_MEMALIGN: u8 = 15;
}

/// A place in a workload.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn byte(&mut self) -> Option<u8> {
        let byte = *self.bytes.get(self.at)?;
        self.at += 1;
        Some(byte)
    }

    fn number(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for _ in 0..10 {
            let byte = self.byte()?;
            number = number.checked_mul(128)? | u64::from(byte & 0x7f);
            if byte & 0x80 == 0 {
                return Some(number);
            }
        }
        None
    }
}

/// Whether a file begins as a workload: the number of pointers, then that of synchronisations.
pub(super) fn is_workload(first: &[u8]) -> bool {
    let mut cursor = Cursor { bytes: first, at: 0 };
    cursor.byte() == Some(code::ALLOC_PTRS) && cursor.number().is_some() && cursor.byte() == Some(code::ALLOC_SYNCS)
}

/// A thread of a workload.
struct Thread<'a> {
    cursor: Cursor<'a>,
    number: u32,
    is_done: bool,
}

/// Why a thread's turn ended.
enum Turn {
    Over,
    Waits,
    Done,
}

/// Converts a workload of glibc's simulator. The threads take turns.
pub(super) fn workload<W: Write, R: Read>(input: Input<R>, out: W, options: &Options) -> Result<Converted, ConvertError> {
    const CUT: ConvertError = ConvertError::Invalid("the workload's beginning is damaged");
    let mut bytes = Vec::new();
    input.take(WHOLE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > WHOLE_BYTES_MAX {
        return Err(ConvertError::Invalid("a workload is read as a whole, 256 MiB at most"));
    }
    let mut main = Cursor { bytes: &bytes, at: 0 };
    let mut threads: Vec<Thread<'_>> = Vec::new();
    loop {
        match main.byte().ok_or(CUT)? {
            code::NOP => {}
            code::DONE => break,
            code::ALLOC_PTRS | code::ALLOC_SYNCS | code::NTHREADS => {
                main.number().ok_or(CUT)?;
            }
            code::START_THREAD => {
                let at = usize::try_from(main.number().ok_or(CUT)?).map_err(|_| CUT)?;
                if threads.len() as u64 >= THREADS_MAX {
                    return Err(ConvertError::Invalid("the workload has too many threads"));
                }
                threads.push(Thread { cursor: Cursor { bytes: &bytes, at }, number: threads.len() as u32 + 1, is_done: false });
            }
            _ => return Err(CUT),
        }
    }
    let header = Header { is_from_start: true, allocators: vec![ALLOCATOR.into()], page_bytes: 4096, ..Header::default() };
    let lacks = [NO_TIMES, LACKS_STACKS, LACKS_ORDER];
    let mut output = Output::new(out, header, "a workload of glibc's malloc simulator", &lacks, options)?;
    // A point is named by two bytes at least.
    let mut reached = Reached { bits: Vec::new(), points_max: bytes.len() as u64 };
    let mut clock = Clock(0);
    while threads.iter().any(|thread| !thread.is_done) {
        let mut has_moved = false;
        for thread in threads.iter_mut().filter(|thread| !thread.is_done) {
            let before = thread.cursor.at;
            let turn = turn(thread, &mut reached, &mut clock, &mut output)?;
            thread.is_done = matches!(turn, Turn::Done);
            has_moved |= thread.is_done || thread.cursor.at > before;
        }
        if !has_moved {
            return Err(ConvertError::Invalid("the workload's threads wait for each other for ever"));
        }
    }
    output.finish(&Names::default(), &[ALLOCATOR.to_owned()], Some(clock.0))
}

/// The points that were reached.
struct Reached {
    bits: Vec<u64>,
    points_max: u64,
}

impl Reached {
    fn set(&mut self, point: u64) {
        let at = (point / 64) as usize;
        if point <= self.points_max {
            self.bits.resize(self.bits.len().max(at + 1), 0);
            if let Some(bits) = self.bits.get_mut(at) {
                *bits |= 1 << (point % 64);
            }
        }
    }

    fn has(&self, point: u64) -> bool {
        self.bits.get((point / 64) as usize).is_some_and(|bits| bits >> (point % 64) & 1 == 1)
    }
}

/// Some calls of a thread.
fn turn<W: Write>(thread: &mut Thread<'_>, reached: &mut Reached, clock: &mut Clock, output: &mut Output<W>) -> Result<Turn, ConvertError> {
    const CUT: ConvertError = ConvertError::Invalid("a thread of the workload is cut or damaged");
    let number = thread.number;
    let cursor = &mut thread.cursor;
    for _ in 0..TURN {
        let before = cursor.at;
        let op = cursor.byte().ok_or(CUT)?;
        let mut argument = || cursor.number().ok_or(CUT);
        match op {
            code::NOP => {}
            code::DONE => return Ok(Turn::Done),
            code::SYNC_W => reached.set(argument()?),
            code::SYNC_R => {
                if !reached.has(argument()?) {
                    cursor.at = before;
                    return Ok(Turn::Waits);
                }
            }
            code::FREE => {
                let block = argument()?;
                if block != 0 {
                    output.free((number, clock.next_ns()), block)?;
                }
            }
            code::REALLOC => {
                let (new, old, size) = (argument()?, argument()?, argument()?);
                output.realloc((number, clock.next_ns()), old, (new != 0).then_some(new), (0, size))?;
            }
            code::MALLOC | code::CALLOC | code::VALLOC | code::PVALLOC | code::MEMALIGN | code::POSIX_MEMALIGN => {
                let block = argument()?;
                let how = match op {
                    code::CALLOC => ZEROED,
                    code::VALLOC | code::PVALLOC => aligned(PAGE_BITS),
                    code::MEMALIGN | code::POSIX_MEMALIGN => aligned(bits(argument()?)),
                    _ => How::default(),
                };
                let size = argument()?;
                if block != 0 {
                    output.alloc((number, clock.next_ns()), block, 0, size, how)?;
                }
            }
            _ => return Err(CUT),
        }
    }
    Ok(Turn::Over)
}

/// Converts the text that `mtrace(3)` writes: `@ CALLER + ADDRESS SIZE` and so on.
pub(super) fn text<W: Write, R: Read>(input: Input<R>, out: W, options: &Options) -> Result<Converted, ConvertError> {
    const LACKS: [&str; 5] = [NO_TIMES, NO_THREADS, "alignments", "which blocks were to be zeros", "the heap from before"];
    let header = Header { allocators: vec![ALLOCATOR.into()], page_bytes: 4096, ..Header::default() };
    let mut output = Output::new(out, header, "the text of mtrace(3)", &LACKS, options)?;
    output.writer.without_seed("mtrace does not write the heap from before it was turned on");
    let mut lines = Lines::new(input);
    let (mut clock, mut callers) = (Clock(0), HashMap::<Vec<u8>, u64>::new());
    // Of a realloc: the block that it takes.
    let (mut taken, mut caller_bytes) = (0, 0);
    while let Some(line) = lines.next()? {
        if line.is_empty() || line.starts_with(b"= ") {
            continue;
        }
        let (caller, call) = match line.strip_prefix(b"@ ") {
            Some(rest) => {
                // The caller's text has no spaces unless its path has.
                let from_end = call_bytes(rest);
                rest.split_at(rest.len() - from_end)
            }
            None => (&[][..], line),
        };
        let mut fields = call.split(|&byte| byte == b' ').filter(|field| !field.is_empty());
        let (op, addr, size) = (fields.next().unwrap_or_default(), fields.next().and_then(hex), fields.next().and_then(hex));
        let next = callers.len() as u64;
        let stack = match callers.get(caller) {
            Some(&stack) => stack,
            None if caller_bytes < CALLER_BYTES_MAX => {
                caller_bytes += caller.len() + ENTRY_BYTES;
                *callers.entry(caller.to_vec()).or_insert(next)
            }
            None => return Err(ConvertError::Invalid("it has too many callers")),
        };
        match (op, addr, size) {
            (b"+", Some(0), _) => {}
            (b"+", Some(addr), Some(size)) => output.alloc((1, clock.next_ns()), addr, stack, size, How::default())?,
            (b"-", Some(addr), None) => output.free((1, clock.next_ns()), addr)?,
            (b"<", Some(addr), None) => taken = addr,
            (b">", Some(addr), Some(size)) => {
                output.realloc((1, clock.next_ns()), std::mem::take(&mut taken), (addr != 0).then_some(addr), (stack, size))?;
            }
            (b"!", Some(_), _) => taken = 0,
            _ => output.skipped += 1,
        }
    }
    let stacks = output.writer.stacks();
    let mut by_number: Vec<Vec<u8>> = vec![Vec::new(); callers.len()];
    for (caller, number) in callers {
        if let Some(place) = by_number.get_mut(number as usize) {
            *place = caller;
        }
    }
    output.finish(&names(&stacks, &by_number), &[ALLOCATOR.to_owned()], None)
}

/// Bytes of the call at the end of a line: an operation and one or two numbers.
fn call_bytes(line: &[u8]) -> usize {
    let is_op = |field: &[u8]| matches!(field, b"+" | b"-" | b"<" | b">" | b"!");
    let mut bytes = 0;
    for field in line.rsplit(|&byte| byte == b' ').take(3) {
        bytes += field.len() + 1;
        if is_op(field) {
            return bytes.min(line.len());
        }
    }
    line.len()
}

/// Each caller is a stack of one function: `./shop:(load+0x1c)[0x401136]` is `load`, and without a symbol the whole text.
fn names(stacks: &[u64], callers: &[Vec<u8>]) -> Names {
    let (mut names, mut bytes) = (NamesWriter::default(), 0);
    for &stack in stacks {
        let caller = callers.get(stack as usize).map(Vec::as_slice).unwrap_or_default();
        let caller = String::from_utf8_lossy(caller.trim_ascii());
        let symbol = caller.split_once(":(").and_then(|(_, rest)| rest.split(['+', ')']).next()).filter(|symbol| !symbol.is_empty());
        let name = symbol.unwrap_or(&caller);
        bytes += name.len();
        if !name.is_empty() && bytes < NAME_BYTES_MAX {
            let function = names.function(name.to_owned());
            names.stack(&[function]);
        } else {
            names.stack(&[]);
        }
    }
    names.finish()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::super::event::{Op, Request};
    use super::super::tests::{OPTIONS, converted};

    fn record(thread: i32, kind: u8, [ptr1, ptr2, size, size2]: [u64; 4]) -> Vec<u8> {
        let mut record = thread.to_le_bytes().to_vec();
        record.extend([kind, 1, 0, 0]);
        for word in [ptr1, ptr2, size, size2, 0, 0, 0] {
            record.extend(word.to_le_bytes());
        }
        record
    }

    fn request(size_bytes: u64, alignment_bits: u8, is_zeroed: bool) -> Op {
        Op::Alloc(Request { stack: 0, size_bytes, alignment_bits, is_zeroed })
    }

    fn ops(bytes: &[u8]) -> Vec<(u32, Op)> {
        converted(bytes).1.into_iter().map(|(thread, _, op)| (thread, op)).collect()
    }

    #[test]
    fn records_of_each_kind_become_events() {
        let bytes = [
            record(7, 255, [0x1234, 0, 8, 0]),
            record(7, 1, [0, 0x100, 24, 0]),
            record(7, 2, [0, 0x200, 48, 0]),
            record(9, 5, [0, 0x300, 64, 256]),
            record(9, 8, [0, 0x400, 64, 4096]),
            // It failed.
            record(9, 8, [22, 0, 64, 3]),
            record(7, 4, [0x100, 0x500, 96, 0]),
            record(9, 3, [0x200, 0, 0, 0]),
            record(9, 0, [0; 4]),
            record(9, 99, [0; 4]),
        ]
        .concat();
        let (header, events, _, done) = converted(&bytes);
        assert!(!header.has_times() && header.is_from_start);
        assert_eq!(done.skipped, 1);
        let events: Vec<(u32, Op)> = events.into_iter().map(|(thread, _, op)| (thread, op)).collect();
        assert_eq!(
            events,
            [
                (0, request(24, 0, false)),
                (0, request(48, 0, true)),
                (1, request(64, 8, false)),
                (1, request(64, 12, false)),
                (0, Op::ReallocFree { block: 0 }),
                (0, request(96, 0, false)),
                (1, Op::Free { block: 1 }),
            ]
        );
    }

    #[test]
    fn an_allocation_that_was_recorded_before_the_free_of_its_address_waits_for_it() {
        let bytes = [
            record(1, 255, [0x1234, 0, 8, 0]),
            record(1, 1, [0, 0x100, 24, 0]),
            record(2, 1, [0, 0x100, 32, 0]),
            record(1, 3, [0x100, 0, 0, 0]),
        ]
        .concat();
        assert_eq!(ops(&bytes), [(0, request(24, 0, false)), (0, Op::Free { block: 0 }), (1, request(32, 0, false))]);
    }

    /// A workload of two threads: the second frees what the first allocates. Numbers below 128 are one byte.
    fn two_threads(second: &[u8]) -> Vec<u8> {
        let first = [2, 1, 40, 12, 2, 64, 100, 6, 1, 1];
        let begin = 11;
        let mut bytes = vec![8, 9, 9, 2, 10, 2, 11, begin, 11, begin + first.len() as u8, 1];
        bytes.extend(first);
        bytes.extend(second);
        bytes
    }

    #[test]
    fn threads_of_a_workload_wait_where_it_says_so() {
        // Two bytes: 1 << 7 | 72.
        let bytes = two_threads(&[3, 3, 0x81, 72, 7, 1, 4, 4, 1, 9, 5, 3, 5, 0, 1]);
        assert_eq!(
            ops(&bytes),
            [
                (0, request(40, 0, false)),
                (0, request(100, 6, false)),
                (1, request(200, 0, true)),
                (1, Op::ReallocFree { block: 0 }),
                (1, request(9, 0, false)),
                (1, Op::Free { block: 2 }),
            ]
        );
        let refused = |bytes: &[u8]| super::super::convert(bytes, &mut Vec::new(), &OPTIONS).is_err();
        // A point that nobody reaches, a code that does not exist, a cut.
        assert!(refused(&two_threads(&[7, 2, 1])) && refused(&two_threads(&[77, 1])) && refused(&two_threads(&[2, 1])));
        for cut in 0..bytes.len() {
            let _ = super::super::convert(&bytes[..cut], &mut Vec::new(), &OPTIONS);
        }
    }

    #[test]
    fn the_text_of_mtrace_has_callers() {
        let text = "= Start\n@ ./my shop:(load+0x1c)[0x401136] + 0x100 0x18\n@ ./my shop:[0x99] + 0x200 0x20\n+ 0x300 0x8\n\
                    @ ./my shop:(load+0x40)[0x401150] < 0x100\n@ ./my shop:(load+0x40)[0x401150] > 0x400 0x100\n- 0x200\n! 0x400 0x10\n\
                    nonsense\n= End\n";
        let (header, events, names, done) = converted(text.as_bytes());
        assert!(!header.is_from_start && header.lacks.len() == 5);
        let ops: Vec<Op> = events.iter().map(|event| event.2).collect();
        assert_eq!(ops.len(), 6, "{ops:?}");
        assert_eq!((ops[3], ops[5]), (Op::ReallocFree { block: 0 }, Op::Free { block: 1 }));
        assert_eq!(names.functions, ["load", "./my shop:[0x99]", "load"]);
        let stacks: Vec<Vec<u32>> = (0..names.stacks()).map(|stack| names.indices_of(stack).collect()).collect();
        assert_eq!(stacks, [vec![0], vec![1], vec![], vec![2]]);
        assert_eq!((done.skipped, done.end.has_exited), (1, false));
    }
}
