//! Traces that no recorder wrote: refused, or replayed within bounds.

use std::path::PathBuf;
use std::time::Instant;

use fragprof::trace::event::Op;
use fragprof::trace::{Header, How, Names, Seed, SeedChunk, SeedRegion, Writer};
use tempfile::TempDir;

use super::whatif;
use crate::support::LIMIT;

/// Writes a trace, and replays it under the C library; returns the exit status and the output.
fn replayed(write: impl FnOnce(&mut Writer<&mut Vec<u8>>)) -> (Option<i32>, String) {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, &Header { comm: "hostile".into(), ..Header::default() }, u64::MAX).unwrap();
    write(&mut writer);
    writer.finish(&Names::default(), &[]).unwrap();
    replayed_bytes(&bytes)
}

fn replayed_bytes(bytes: &[u8]) -> (Option<i32>, String) {
    let directory = TempDir::new().unwrap();
    let path: PathBuf = directory.path().join("trace");
    std::fs::write(&path, bytes).unwrap();
    let done = whatif(&path, &["--under", "glibc:tcache_count=0", "--memory-limit", "512", "--time-limit", "20s"]);
    let text = format!("{}{}", String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    (done.status.code(), text)
}

#[test]
fn sizes_that_no_memory_has_end_the_replay_with_the_reason() {
    let (status, text) = replayed(|writer| {
        writer.alloc((1, 0), 0x1000, 1, 1 << 63, How::default()).unwrap();
        writer.alloc((1, 0), 0x2000, 1, u64::MAX, How { alignment_bits: 63, is_zeroed: true }).unwrap();
    });
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("more than the limit of 512 MiB"), "{text}");
}

#[test]
fn alignments_that_no_allocator_has_are_failed_calls() {
    let (status, text) = replayed(|writer| {
        for bits in 0..63 {
            writer.alloc((1, 0), 0x1000 * (u64::from(bits) + 1), 1, 64, How { alignment_bits: bits, is_zeroed: bits % 2 == 1 }).unwrap();
        }
    });
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("calls failed"), "{text}");
}

#[test]
fn a_million_threads_are_replayed_with_as_many_as_there_may_be() {
    let began = Instant::now();
    let (status, text) = replayed(|writer| {
        for thread in 1..=1_000_000 {
            writer.alloc((thread, 0), u64::from(thread) << 12, 1, 24, How::default()).unwrap();
        }
    });
    assert_eq!(status, Some(0), "{text}");
    assert!(began.elapsed() < 4 * LIMIT, "{:?}", began.elapsed());
}

#[test]
fn frees_of_blocks_that_were_never_allocated_are_not_replayed() {
    let (status, text) = replayed(|writer| {
        writer.free((1, 0), 0xdead_0000).unwrap();
        writer.realloc_free((1, 0), 0xdead_1000).unwrap();
        writer.alloc((1, 10), 0x2000, 1, 100, How::default()).unwrap();
        writer.free((2, 20), 0x2000).unwrap();
        writer.free((2, 30), 0x2000).unwrap();
        writer.realloc_fail(2, 0x2000).unwrap();
        writer.other((1, 40), Op::Map { addr: u64::MAX, bytes: u64::MAX, is_writable: true }).unwrap();
        writer.other((1, 40), Op::Unmap { addr: 0, bytes: u64::MAX }).unwrap();
        writer.thread_end((2, 50)).unwrap();
        writer.thread_end((9, 50)).unwrap();
        writer.alloc((2, u64::MAX / 2), 0x2000, 1, 100, How::default()).unwrap();
    });
    assert_eq!(status, Some(0), "{text}");
    let (status, text) = replayed(|_| {});
    assert_eq!(status, Some(2));
    assert!(text.contains("no allocation"), "{text}");
}

#[test]
fn heaps_from_before_that_no_memory_has_are_refused_or_end_the_replay_with_the_reason() {
    let seeded = |usable_bytes: u64, free: Option<u64>| {
        replayed(|writer| {
            let chunks = vec![SeedChunk { addr: 1 << 20, usable_bytes, free }];
            writer.seed(&Seed { regions: vec![SeedRegion { arena: Some(u32::MAX - 1), chunks }] }).unwrap();
            writer.alloc((1, 0), 0x1000, 1, 100, How::default()).unwrap();
            writer.free((1, 0), 1 << 20).unwrap();
        })
    };
    let (status, text) = seeded(1 << 62, Some(1 << 62));
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("live blocks at a time"), "{text}");
    for free in [None, Some(0)] {
        let (status, text) = seeded(1 << 40, free);
        assert_eq!(status, Some(0), "{text}");
        assert!(text.contains("more than the limit of 512 MiB"), "{text}");
    }
    let (status, text) = replayed(|writer| {
        writer.without_seed("the census was not usable");
        writer.alloc((1, 0), 0x1000, 1, 100, How::default()).unwrap();
    });
    assert_eq!(status, Some(0), "{text}");
    assert!(text.contains("the census was not usable") && text.contains("blocks from before the recording are not replayed"), "{text}");
}

#[test]
fn a_trace_cut_anywhere_is_replayed_as_far_as_it_goes_or_refused() {
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, &Header::default(), u64::MAX).unwrap();
    for block in 0..200_000u64 {
        writer.alloc((1, block * 1000), 0x1000 + block % 500 * 64, block % 7, block % 3000, How::default()).unwrap();
    }
    writer.finish(&Names::default(), &[]).unwrap();
    let length = bytes.len();
    for cut in [0, 7, 8, 20, 100, length / 3, length / 2, length - 200, length - 1] {
        let (status, text) = replayed_bytes(&bytes[..cut]);
        assert!(matches!(status, Some(0 | 2)), "cut at {cut}: {status:?} {text}");
    }
}
