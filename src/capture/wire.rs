//! The records' layout in the ring, and their decoding.
//!
//! Records come from fragprof's own programs, but they are validated anyway: a record of unknown kind or insufficient length is counted as
//! malformed and skipped.

use zerocopy::{FromBytes, Immutable, KnownLayout};

pub use crate::bpf::Head;
use crate::bpf::{self, RecordKind, VmOp};
use crate::units::{Addr, StackHash};

/// Number of words by which a block is identified.
pub const WORDS: usize = bpf::WORDS as usize;
/// Size of the smallest record of a call, in bytes.
pub const FREE_BYTES: u64 = size_of::<bpf::Free>() as u64;

impl Head {
    /// CLOCK_MONOTONIC in nanoseconds, given a reading of that clock within 39 hours of the record.
    pub fn time_ns(&self, near_ns: u64) -> u64 {
        let mask = (1 << bpf::STAMP_TIME_BITS) - 1;
        let half = 1 << (bpf::STAMP_TIME_BITS - 1);
        let ahead = (self.stamp & mask).wrapping_sub(near_ns & mask) & mask;
        // In the upper half it is earlier.
        if ahead < half { near_ns.wrapping_add(ahead) } else { near_ns.wrapping_sub((mask + 1) - ahead) }
    }

    /// The low bits of the slot's generation.
    pub fn generation_low(&self) -> u16 {
        (self.stamp >> bpf::STAMP_TIME_BITS) as u16
    }

    /// Whether the record belongs to the slot's owner with this generation.
    pub fn is_of(&self, generation: u32) -> bool {
        self.generation_low() == generation as u16
    }
}

/// `enum fp_vm_op` with its arguments: a change of the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmChange {
    /// New mapping of `len` bytes at `addr`.
    Mmap {
        /// Start as returned by the kernel.
        addr: Addr,
        /// Bytes requested (the kernel rounds up to pages).
        len: u64,
        /// `PROT_*`.
        prot: u32,
        /// `MAP_*`.
        flags: u32,
        /// File descriptor, −1 for anonymous memory.
        fd: i32,
    },
    /// Removal of a range.
    Munmap {
        /// Start.
        addr: Addr,
        /// Bytes.
        len: u64,
    },
    /// A mapping moved or resized.
    Mremap {
        /// Old start.
        old: Addr,
        /// Old length, bytes.
        old_len: u64,
        /// New start.
        new: Addr,
        /// New length, bytes.
        new_len: u64,
        /// `MREMAP_*`
        flags: u32,
    },
    /// A new program break.
    Brk {
        /// Break after the call.
        end: Addr,
    },
    /// Advice for a range.
    Madvise {
        /// Start.
        addr: Addr,
        /// Bytes.
        len: u64,
        /// `MADV_*`.
        advice: u32,
    },
    /// New protection for a range.
    Mprotect {
        /// Start.
        addr: Addr,
        /// Bytes.
        len: u64,
        /// `PROT_*`.
        prot: u32,
    },
    /// A page was touched for the first time; sampled.
    Touch {
        /// Address touched.
        addr: Addr,
        /// Number of first touches that this one represents.
        touches: u64,
    },
}

/// The content of a record, without its head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Body<'a> {
    /// A block was allocated.
    Alloc {
        /// The block.
        addr: Addr,
        /// Bytes requested.
        size: u64,
        /// Stack of the call, 0 = none.
        stack: StackHash,
        /// log2 of the requested alignment; 0 = the allocator's own.
        alignment_bits: u8,
    },
    /// The program reports an allocation that represents others.
    Sample {
        /// The block.
        addr: Addr,
        /// Bytes requested.
        size: u64,
        /// Bytes that it represents.
        weight: u64,
        /// Mean sample distance with which it was drawn, bytes; 0 = the program does not report it.
        interval: u64,
        /// Stack of the call, 0 = none.
        stack: StackHash,
    },
    /// The contents of a block when it was allocated.
    Contents {
        /// The block.
        addr: Addr,
        /// Its words at their positions; 0 where there is none or it could not be read.
        words: &'a [u64; WORDS],
        /// Bit i: word i could be read.
        known: u32,
    },
    /// A block is about to be freed.
    Free {
        /// The block.
        addr: Addr,
        /// Stack of the call, 0 = not taken.
        stack: StackHash,
    },
    /// As `Free`, by a realloc that may still fail.
    ReallocFree {
        /// The old block.
        addr: Addr,
    },
    /// The thread's realloc failed: the old block is still live.
    ReallocFail {
        /// The old block.
        addr: Addr,
    },
    /// Defines a stack hash.
    Stack {
        /// The hash.
        hash: StackHash,
        /// Frame words, leaf first (`FP_FRAME_*` in the top byte).
        frames: &'a [u64],
        /// `enum fp_unwind_end`.
        end: u8,
    },
    /// The Python frames of the stack that is defined next.
    PythonStack {
        /// Its hash.
        hash: StackHash,
        /// Frames, innermost first.
        frames: &'a [bpf::PythonFrame],
        /// `enum fp_python_end`.
        end: u8,
    },
    /// A Python code object.
    PythonCode {
        /// The fixed part.
        code: &'a bpf::PythonCode,
        /// The beginning of its table of lines.
        lines: &'a [u8],
    },
    /// The address space changed.
    Vm {
        /// The change.
        change: VmChange,
        /// Stack of the allocator call that caused it, 0 = none.
        stack: StackHash,
        /// Bytes that this call requests.
        request: u64,
    },
    /// The process replaced its image.
    Exec {
        /// Its new name as in the kernel: may contain any byte.
        comm: [u8; 16],
    },
    /// A child was created.
    Fork {
        /// The child's pid.
        child: u32,
        /// It runs in its parent's memory until it executes a program (vfork).
        shares_memory: bool,
    },
    /// The process has ended.
    Exit {
        /// Wait status as in `wait(2)`.
        code: u32,
    },
    /// A thread has ended.
    ThreadExit,
    /// A pc had no unwind table.
    NeedTable {
        /// The pc.
        pc: Addr,
    },
}

impl Body<'_> {
    /// Whether an allocator call ends with this record: each call has exactly one such record; a realloc's free of the old block does not
    /// count.
    #[must_use]
    pub fn ends_a_call(&self) -> bool {
        matches!(self, Self::Alloc { .. } | Self::Sample { .. } | Self::Free { .. })
    }
}

/// A decoded record.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Slot, thread and time.
    pub head: Head,
    /// Content.
    pub body: Body<'a>,
}

/// A record that is not valid for its kind. This is always a bug in the programs or the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed record of kind {kind}, {len} bytes")]
pub struct Malformed {
    /// First byte, 0 if there is none.
    pub kind: u8,
    /// Bytes.
    pub len: usize,
}

/// Decodes a record from the ring (8-byte aligned).
pub fn decode(bytes: &[u8]) -> Result<Record<'_>, Malformed> {
    decode_checked(bytes).ok_or(Malformed { kind: bytes.first().copied().unwrap_or(0), len: bytes.len() })
}

fn raw<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(raw, _)| raw)
}

fn decode_checked(bytes: &[u8]) -> Option<Record<'_>> {
    let head = *raw::<Head>(bytes)?;
    let body = match RecordKind::from_wire(head.kind)? {
        RecordKind::Alloc => {
            let r = raw::<bpf::Alloc>(bytes)?;
            let (size, alignment_bits) = (r.size & ((1 << bpf::ALLOC_SIZE_BITS) - 1), (r.size >> bpf::ALLOC_SIZE_BITS) as u8 & 63);
            Body::Alloc { addr: Addr(r.addr), size, stack: StackHash(r.stack), alignment_bits }
        }
        RecordKind::Sample => {
            let r = raw::<bpf::Sample>(bytes)?;
            Body::Sample { addr: Addr(r.addr), size: r.size, weight: r.weight, interval: r.interval, stack: StackHash(r.stack) }
        }
        RecordKind::Contents => {
            let r = raw::<bpf::Contents>(bytes)?;
            Body::Contents { addr: Addr(r.addr), words: &r.words, known: r.known }
        }
        RecordKind::Free => Body::Free { addr: Addr(raw::<bpf::Free>(bytes)?.addr), stack: StackHash(0) },
        RecordKind::FreeStack => {
            let r = raw::<bpf::FreeStack>(bytes)?;
            Body::Free { addr: Addr(r.addr), stack: StackHash(r.stack) }
        }
        RecordKind::ReallocFree => Body::ReallocFree { addr: Addr(raw::<bpf::Free>(bytes)?.addr) },
        RecordKind::ReallocFail => Body::ReallocFail { addr: Addr(raw::<bpf::Free>(bytes)?.addr) },
        RecordKind::Stack => {
            let (r, rest) = bpf::Stack::ref_from_prefix(bytes).ok()?;
            let len = usize::from(r.len);
            if len > bpf::FRAMES_DEEP_MAX as usize {
                return None;
            }
            let (frames, _) = <[u64]>::ref_from_prefix_with_elems(rest, len).ok()?;
            Body::Stack { hash: StackHash(r.hash), frames, end: r.end }
        }
        RecordKind::PythonStack => {
            let (r, rest) = bpf::PythonStack::ref_from_prefix(bytes).ok()?;
            let len = usize::from(r.len);
            if len > bpf::PYTHON_FRAMES_MAX as usize {
                return None;
            }
            let (frames, _) = <[bpf::PythonFrame]>::ref_from_prefix_with_elems(rest, len).ok()?;
            Body::PythonStack { hash: StackHash(r.hash), frames, end: r.end }
        }
        RecordKind::PythonCode => {
            let (code, rest) = bpf::PythonCode::ref_from_prefix(bytes).ok()?;
            Body::PythonCode { code, lines: rest.get(..usize::try_from(code.lines.bytes).ok()?)? }
        }
        RecordKind::Vm => {
            let r = raw::<bpf::Vm>(bytes)?;
            Body::Vm { change: vm_change(r)?, stack: StackHash(r.stack), request: r.request }
        }
        RecordKind::Exec => Body::Exec { comm: raw::<bpf::Life>(bytes)?.comm },
        RecordKind::Fork => Body::Fork { child: raw::<bpf::Life>(bytes)?.other, shares_memory: head.function != 0 },
        RecordKind::Exit => Body::Exit { code: raw::<bpf::Life>(bytes)?.other },
        RecordKind::ThreadExit => Body::ThreadExit,
        RecordKind::NeedTable => Body::NeedTable { pc: Addr(raw::<bpf::NeedTable>(bytes)?.pc) },
    };
    Some(Record { head, body })
}

fn vm_change(r: &bpf::Vm) -> Option<VmChange> {
    let addr = Addr(r.addr);
    Some(match VmOp::from_wire(r.op)? {
        VmOp::Mmap => VmChange::Mmap { addr, len: r.len, prot: r.prot, flags: r.flags, fd: r.fd },
        VmOp::Munmap => VmChange::Munmap { addr, len: r.len },
        VmOp::Mremap => VmChange::Mremap { old: addr, old_len: r.len, new: Addr(r.addr2), new_len: r.len2, flags: r.flags },
        VmOp::Brk => VmChange::Brk { end: addr },
        VmOp::Madvise => VmChange::Madvise { addr, len: r.len, advice: r.flags },
        VmOp::Mprotect => VmChange::Mprotect { addr, len: r.len, prot: r.prot },
        VmOp::Touch => VmChange::Touch { addr, touches: r.len2 },
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[repr(C, align(8))]
    struct Aligned<const N: usize>([u8; N]);

    fn alloc_record() -> Aligned<40> {
        let mut bytes = [0; 40];
        bytes[0] = RecordKind::Alloc as u8;
        bytes[2..4].copy_from_slice(&7u16.to_le_bytes());
        bytes[16..24].copy_from_slice(&0x7f00_0000_1000u64.to_le_bytes());
        bytes[24..32].copy_from_slice(&100u64.to_le_bytes());
        bytes[32..40].copy_from_slice(&0xabcdu64.to_le_bytes());
        Aligned(bytes)
    }

    #[test]
    fn an_allocation_is_decoded_field_by_field() {
        let bytes = alloc_record();
        let record = decode(&bytes.0).unwrap();
        assert_eq!(record.head.slot, 7);
        assert_eq!(record.body, Body::Alloc { addr: Addr(0x7f00_0000_1000), size: 100, stack: StackHash(0xabcd), alignment_bits: 0 });
    }

    #[test]
    fn a_truncated_record_is_refused_at_every_length() {
        let bytes = alloc_record();
        for len in 0..40 {
            assert_eq!(decode(&bytes.0[..len]).unwrap_err().len, len);
        }
    }

    #[test]
    fn a_stack_that_claims_more_frames_than_it_has_is_refused() {
        let mut bytes = Aligned([0; 48]);
        bytes.0[0] = RecordKind::Stack as u8;
        bytes.0[24] = 2;
        assert!(matches!(decode(&bytes.0).unwrap().body, Body::Stack { frames: [0, 0], .. }));
        bytes.0[24] = 3;
        assert!(decode(&bytes.0).is_err());
        bytes.0[25] = 0xff;
        assert!(decode(&bytes.0).is_err());
    }

    #[test]
    fn a_time_is_completed_from_a_clock_reading_on_either_side_of_a_wrap() {
        let head = |time: u64| Head { kind: 1, function: 0, slot: 0, tid: 0, stamp: 5 << 48 | (time & ((1 << 48) - 1)) };
        for time in [1_000u64, (1 << 48) - 5, (1 << 48) + 5, (3 << 48) + 123_456] {
            for near in [time, time + 1_000_000, time.saturating_sub(1_000_000)] {
                assert_eq!(head(time).time_ns(near), time, "near {near}");
            }
            assert!(head(time).is_of(5) && head(time).is_of(0x1_0005) && !head(time).is_of(6));
        }
    }

    #[test]
    fn unknown_kinds_are_refused() {
        for kind in [0, 17, 255] {
            let mut bytes = Aligned([0; 128]);
            bytes.0[0] = kind;
            assert_eq!(decode(&bytes.0).unwrap_err().kind, kind);
        }
    }
}
