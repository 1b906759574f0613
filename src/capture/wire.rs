//! The Rust side of `bpf/fragprof.h`: the records as they lie in the ring, and their decoding.
//!
//! A record comes from our own programs, yet it is read with checks: a record of unknown kind or short length is counted as malformed
//! and skipped, never trusted.

use std::sync::atomic::{AtomicU32, AtomicU64};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::units::{Addr, StackHash};

/// `FP_TARGETS_MAX`: watched processes at a time.
pub const TARGETS_MAX: u32 = 1024;
/// `FP_FRAMES_MAX`: frames of one stack.
pub const FRAMES_MAX: usize = 128;
/// `FP_SHARDS_MAX`: ring buffers.
pub const SHARDS_MAX: u32 = 16;

/// `FP_TARGET_STACKS`: take the stack of each allocation.
pub const TARGET_STACKS: u32 = 1 << 0;
/// `FP_TARGET_FREE_STACKS`: take the stack of each free too.
pub const TARGET_FREE_STACKS: u32 = 1 << 1;
/// `FP_TARGET_VM`: send changes of the address space.
pub const TARGET_VM: u32 = 1 << 2;
/// `FP_TARGET_ON`: take new calls. Set when all probes are in, cleared before the first is taken out.
pub const TARGET_ON: u32 = 1 << 3;
/// `FP_TARGET_GOVERNED`: count hits, and switch off when the quota is spent.
pub const TARGET_GOVERNED: u32 = 1 << 4;
/// `FP_TARGET_GROWTH`: take the stack of growth of the address space even outside a recorded allocator call.
pub const TARGET_GROWTH: u32 = 1 << 5;
/// `FP_TARGET_BIRTHS`: send what some blocks hold when they are handed out.
pub const TARGET_BIRTHS: u32 = 1 << 6;
/// `FP_TARGET_LIMITED`: its memory is limited, so no return of an operator new that throws is probed.
pub const TARGET_LIMITED: u32 = 1 << 7;
/// `FP_TARGET_HELD`: it is traced, and held where it maps code and at its entry point.
pub const TARGET_HELD: u32 = 1 << 8;
/// `FP_WORDS`: words of a block by which it is known again.
pub const WORDS: usize = 16;

const REC_ALLOC: u8 = 1;
const REC_FREE: u8 = 2;
const REC_REALLOC_FREE: u8 = 3;
const REC_REALLOC_FAIL: u8 = 4;
const REC_STACK: u8 = 5;
const REC_VM: u8 = 6;
const REC_EXEC: u8 = 7;
const REC_FORK: u8 = 8;
const REC_EXIT: u8 = 9;
const REC_NEED_TABLE: u8 = 10;
const REC_FREE_STACK: u8 = 11;
const REC_SAMPLE: u8 = 12;
const REC_BIRTH: u8 = 13;
/// `FP_USDT_SITES_MAX`: rows that say where the arguments of programs' own probes are.
pub const USDT_SITES_MAX: u32 = 1024;
/// `FP_STAMP_TIME_BITS`.
const STAMP_TIME_BITS: u32 = 48;

/// `struct fp_head`: starts every record.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Head {
    /// What the record says.
    pub kind: u8,
    /// Which entry point: an index into the function table of [`crate::probe`].
    pub function: u8,
    /// Target slot.
    pub slot: u16,
    /// Kernel thread id, initial pid namespace.
    pub tid: u32,
    stamp: u64,
}

impl Head {
    /// CLOCK_MONOTONIC in nanoseconds, given a reading of that clock within 39 hours of the record.
    pub fn time_ns(&self, near_ns: u64) -> u64 {
        let mask = (1 << STAMP_TIME_BITS) - 1;
        let half = 1 << (STAMP_TIME_BITS - 1);
        let ahead = (self.stamp & mask).wrapping_sub(near_ns & mask) & mask;
        // In the upper half it lies behind.
        if ahead < half { near_ns.wrapping_add(ahead) } else { near_ns.wrapping_sub((mask + 1) - ahead) }
    }

    /// The low bits of the slot's generation.
    pub fn generation_low(&self) -> u16 {
        (self.stamp >> STAMP_TIME_BITS) as u16
    }

    /// Whether the record is of the slot's owner with this generation.
    pub fn is_of(&self, generation: u32) -> bool {
        self.generation_low() == generation as u16
    }
}

/// `struct fp_alloc`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawAlloc {
    head: Head,
    addr: u64,
    size: u64,
    stack: u64,
}

/// `struct fp_sample`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawSample {
    head: Head,
    addr: u64,
    size: u64,
    weight: u64,
    interval: u64,
    stack: u64,
}

/// `struct fp_birth`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawBirth {
    head: Head,
    addr: u64,
    known: u32,
    pad: u32,
    words: [u64; WORDS],
}

/// `struct fp_usdt_argument`: where an argument of a program's own probe is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct UsdtArgument {
    /// The constant, or the displacement.
    pub value: i64,
    /// `enum fp_usdt_kind`.
    pub kind: u8,
    /// 1, 2, 4 or 8.
    pub bytes: u8,
    /// 1 = extended by its sign.
    pub is_signed: u8,
    /// DWARF register, 0x1f = none.
    pub base: u8,
    /// Likewise.
    pub index: u8,
    /// Bits.
    pub shift: u8,
    /// 0.
    pub pad: [u8; 2],
}

/// `struct fp_usdt_site`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, IntoBytes, Immutable)]
#[repr(C)]
pub struct UsdtSite {
    /// Block, bytes, weight; interval, or nothing.
    pub arguments: [UsdtArgument; 4],
}

/// Bytes of the smallest record of a call.
pub const FREE_BYTES: u64 = size_of::<RawFree>() as u64;

/// `struct fp_free`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawFree {
    head: Head,
    addr: u64,
}

/// `struct fp_free_stack`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawFreeStack {
    head: Head,
    addr: u64,
    stack: u64,
}

/// `struct fp_stack` without its frames.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawStack {
    head: Head,
    hash: u64,
    len: u16,
    end: u8,
    pad: [u8; 5],
}

/// `struct fp_vm`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawVm {
    head: Head,
    addr: u64,
    len: u64,
    addr2: u64,
    len2: u64,
    op: u32,
    prot: u32,
    flags: u32,
    fd: i32,
    stack: u64,
    request: u64,
}

/// `struct fp_life`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawLife {
    head: Head,
    pid: u32,
    other: u32,
    comm: [u8; 16],
}

/// `struct fp_need_table`.
#[derive(Debug, Clone, Copy, FromBytes, KnownLayout, Immutable)]
#[repr(C)]
struct RawNeedTable {
    head: Head,
    pc: u64,
}

/// `struct fp_target`: a row of the target table. The programs read it, and add to the counts, while the daemon has it mapped.
#[derive(Debug, Default)]
#[repr(C)]
pub struct TargetRow {
    /// Process id, 0 = slot free.
    pub tgid: AtomicU32,
    /// Raised each time the slot gets a new owner.
    pub generation: AtomicU32,
    /// Ring buffer of this process's records.
    pub shard: AtomicU32,
    /// `TARGET_*`.
    pub flags: AtomicU32,
    /// Allocation records lost.
    pub lost_alloc: AtomicU64,
    /// Free records lost.
    pub lost_free: AtomicU64,
    /// Other records lost.
    pub lost_other: AtomicU64,
    /// Calls that never returned.
    pub abandoned: AtomicU64,
    /// Of so many first touches one is recorded; 0 = none.
    pub touch_interval: AtomicU64,
    /// Address space for the unwinder's mapping table.
    pub mm_id: AtomicU64,
    /// Probe hits of a governed target, on or off.
    pub hits: AtomicU64,
    /// Of them, at functions that free.
    pub hits_free: AtomicU64,
    /// Value of `hits` at which the programs switch the target off; once they did so, its value at that moment.
    pub quota_end: AtomicU64,
    /// When they did so, CLOCK_MONOTONIC ns; 0 = they did not.
    pub closed_ns: AtomicU64,
    /// When the window is over, CLOCK_MONOTONIC ns.
    pub deadline_ns: AtomicU64,
    /// Of probes for large blocks: another number each time that they are put in.
    pub epoch: AtomicU64,
    /// Returns that were probed.
    pub returns: AtomicU64,
    /// Time that the programs took, in nanoseconds.
    pub programs_ns: AtomicU64,
}

const _: () = {
    assert!(size_of::<Head>() == 16);
    assert!(size_of::<RawAlloc>() == 40);
    assert!(size_of::<RawFree>() == 24);
    assert!(size_of::<RawFreeStack>() == 32);
    assert!(size_of::<RawStack>() == 32);
    assert!(size_of::<RawVm>() == 80);
    assert!(size_of::<RawLife>() == 40);
    assert!(size_of::<RawNeedTable>() == 24);
    assert!(size_of::<TargetRow>() == 128);
    assert!(size_of::<RawSample>() == 56);
    assert!(size_of::<RawBirth>() == 160);
    assert!(size_of::<UsdtArgument>() == 16);
    assert!(size_of::<UsdtSite>() == 64);
};

/// `enum fp_vm_op` with its arguments: what happened to the address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmChange {
    /// New mapping of `len` bytes at `addr`.
    Mmap {
        /// Start as granted.
        addr: Addr,
        /// Bytes as asked for (the kernel rounds up to pages).
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
    },
    /// The program break is now here.
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
        /// First touches that this one stands for.
        touches: u64,
    },
}

/// What a record says, without its head.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Body<'a> {
    /// A block was handed out.
    Alloc {
        /// The block.
        addr: Addr,
        /// Bytes asked for.
        size: u64,
        /// Stack of the call, 0 = none.
        stack: StackHash,
    },
    /// The program tells of an allocation that stands for others.
    Sample {
        /// The block.
        addr: Addr,
        /// Bytes asked for.
        size: u64,
        /// Bytes it stands for.
        weight: u64,
        /// Mean distance of sample points by which it was drawn, bytes; 0 = the program does not say.
        interval: u64,
        /// Stack of the call, 0 = none.
        stack: StackHash,
    },
    /// What a block held when it was handed out.
    Birth {
        /// The block.
        addr: Addr,
        /// Its words at their places, 0 where there is none or it could not be read.
        words: &'a [u64; WORDS],
        /// Bit i: word i could be read.
        known: u32,
    },
    /// A block is about to be taken back.
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
    /// The thread's realloc failed: the old block lives on.
    ReallocFail {
        /// The old block.
        addr: Addr,
    },
    /// What a stack hash stands for.
    Stack {
        /// The hash.
        hash: StackHash,
        /// Frame words, leaf first (`FP_FRAME_*` in the top byte).
        frames: &'a [u64],
        /// `enum fp_unwind_end`.
        end: u8,
    },
    /// The address space changed.
    Vm {
        /// How.
        change: VmChange,
        /// Stack of the allocator call that did it, 0 = none.
        stack: StackHash,
        /// Bytes that call asks for.
        request: u64,
    },
    /// The process replaced its image.
    Exec {
        /// Its new name, as the kernel has it: may hold any byte.
        comm: [u8; 16],
    },
    /// A child exists.
    Fork {
        /// The child's pid.
        child: u32,
        /// It runs in its parent's memory until it executes a program (vfork).
        shares_memory: bool,
    },
    /// The process is gone.
    Exit {
        /// Wait status as in `wait(2)`.
        code: u32,
    },
    /// A pc had no unwind table.
    NeedTable {
        /// The pc.
        pc: Addr,
    },
}

impl Body<'_> {
    /// Whether an allocator call ends with this record: one in each call, but for a realloc's free of the old block.
    #[must_use]
    pub fn ends_a_call(&self) -> bool {
        matches!(self, Self::Alloc { .. } | Self::Sample { .. } | Self::Free { .. })
    }
}

/// A decoded record.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Who and when.
    pub head: Head,
    /// What.
    pub body: Body<'a>,
}

/// A record that does not have the form of its kind. Only a fault in the programs or the daemon makes one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed record of kind {kind}, {len} bytes")]
pub struct Malformed {
    /// First byte, 0 if there is none.
    pub kind: u8,
    /// Bytes.
    pub len: usize,
}

/// Decodes a record as it lies in the ring (8-byte aligned).
pub fn decode(bytes: &[u8]) -> Result<Record<'_>, Malformed> {
    decode_checked(bytes).ok_or(Malformed { kind: bytes.first().copied().unwrap_or(0), len: bytes.len() })
}

fn raw<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> Option<&T> {
    T::ref_from_prefix(bytes).ok().map(|(raw, _)| raw)
}

fn decode_checked(bytes: &[u8]) -> Option<Record<'_>> {
    let head = *raw::<Head>(bytes)?;
    let body = match head.kind {
        REC_ALLOC => {
            let r = raw::<RawAlloc>(bytes)?;
            Body::Alloc { addr: Addr(r.addr), size: r.size, stack: StackHash(r.stack) }
        }
        REC_SAMPLE => {
            let r = raw::<RawSample>(bytes)?;
            Body::Sample { addr: Addr(r.addr), size: r.size, weight: r.weight, interval: r.interval, stack: StackHash(r.stack) }
        }
        REC_BIRTH => {
            let r = raw::<RawBirth>(bytes)?;
            Body::Birth { addr: Addr(r.addr), words: &r.words, known: r.known }
        }
        REC_FREE => Body::Free { addr: Addr(raw::<RawFree>(bytes)?.addr), stack: StackHash(0) },
        REC_FREE_STACK => {
            let r = raw::<RawFreeStack>(bytes)?;
            Body::Free { addr: Addr(r.addr), stack: StackHash(r.stack) }
        }
        REC_REALLOC_FREE => Body::ReallocFree { addr: Addr(raw::<RawFree>(bytes)?.addr) },
        REC_REALLOC_FAIL => Body::ReallocFail { addr: Addr(raw::<RawFree>(bytes)?.addr) },
        REC_STACK => {
            let (r, rest) = RawStack::ref_from_prefix(bytes).ok()?;
            let len = usize::from(r.len);
            if len > FRAMES_MAX {
                return None;
            }
            let (frames, _) = <[u64]>::ref_from_prefix_with_elems(rest, len).ok()?;
            Body::Stack { hash: StackHash(r.hash), frames, end: r.end }
        }
        REC_VM => {
            let r = raw::<RawVm>(bytes)?;
            Body::Vm { change: vm_change(r)?, stack: StackHash(r.stack), request: r.request }
        }
        REC_EXEC => Body::Exec { comm: raw::<RawLife>(bytes)?.comm },
        REC_FORK => Body::Fork { child: raw::<RawLife>(bytes)?.other, shares_memory: head.function != 0 },
        REC_EXIT => Body::Exit { code: raw::<RawLife>(bytes)?.other },
        REC_NEED_TABLE => Body::NeedTable { pc: Addr(raw::<RawNeedTable>(bytes)?.pc) },
        _ => return None,
    };
    Some(Record { head, body })
}

fn vm_change(r: &RawVm) -> Option<VmChange> {
    let addr = Addr(r.addr);
    Some(match r.op {
        1 => VmChange::Mmap { addr, len: r.len, prot: r.prot, flags: r.flags, fd: r.fd },
        2 => VmChange::Munmap { addr, len: r.len },
        3 => VmChange::Mremap { old: addr, old_len: r.len, new: Addr(r.addr2), new_len: r.len2 },
        4 => VmChange::Brk { end: addr },
        5 => VmChange::Madvise { addr, len: r.len, advice: r.flags },
        6 => VmChange::Mprotect { addr, len: r.len, prot: r.prot },
        7 => VmChange::Touch { addr, touches: r.len2 },
        _ => return None,
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
        bytes[0] = REC_ALLOC;
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
        assert_eq!(record.body, Body::Alloc { addr: Addr(0x7f00_0000_1000), size: 100, stack: StackHash(0xabcd) });
    }

    #[test]
    fn a_cut_record_is_refused_at_every_length() {
        let bytes = alloc_record();
        for len in 0..40 {
            assert_eq!(decode(&bytes.0[..len]).unwrap_err().len, len);
        }
    }

    #[test]
    fn a_stack_that_claims_more_frames_than_it_has_is_refused() {
        let mut bytes = Aligned([0; 48]);
        bytes.0[0] = REC_STACK;
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
        for kind in [0, 14, 255] {
            let mut bytes = Aligned([0; 128]);
            bytes.0[0] = kind;
            assert_eq!(decode(&bytes.0).unwrap_err().kind, kind);
        }
    }
}
