//! A sample for the tests of the views.

use std::sync::Arc;

use super::sample::{Basis, Heap, HeapReading, Named, Numbers, Peak, ProcessSample, Sample, StackKey, StackSample};
use crate::profile::{Counter, Frame, HeapSummary};
use crate::units::StackId;

/// A frame of a function with its location.
pub fn frame(function: &str, file: &str, line: u32) -> Frame {
    Frame { file: Arc::from(file), line, module: Arc::from("/usr/bin/shop"), address: 0x1234, ..Frame::named(function) }
}

/// A stack of these frames, leaf first.
pub fn stack(id: u32, numbers: Numbers, frames: Vec<Frame>) -> StackSample {
    StackSample { key: StackKey { image: 0, id: StackId(id) }, numbers, named: Named::new(frames, None) }
}

fn numbers(inuse_bytes: u64, inuse_allocations: u64, rate: f64) -> Numbers {
    Numbers {
        inuse_bytes,
        inuse_allocations,
        allocated_bytes: inuse_bytes * 2,
        allocations: inuse_allocations * 2,
        allocated_bytes_per_s: Some(rate * 64.0),
        allocations_per_s: Some(rate),
        ..Numbers::default()
    }
}

/// 80 MiB of extent, of which 64 are resident and 40 live.
fn census() -> HeapReading {
    let mib = |mib: u64| Some(mib << 20);
    HeapReading {
        basis: Basis::Census,
        ladder: HeapSummary {
            extent_bytes: mib(80),
            resident_bytes: mib(64),
            live_bytes: mib(40),
            trimmable_bytes: mib(16),
            pinned_bytes: mib(8),
            unknown_bytes: Some(0),
        },
        swapped_bytes: Some(0),
        fragmentation_ratio: Some(0.375),
        extent_ratio: Some(2.0),
        ..HeapReading::default()
    }
}

/// 8 MiB of extent, of which 1 is resident.
fn mappings() -> HeapReading {
    let ladder = HeapSummary { extent_bytes: Some(8 << 20), resident_bytes: Some(1 << 20), ..HeapSummary::default() };
    HeapReading { basis: Basis::Mappings, ladder, swapped_bytes: Some(0), ..HeapReading::default() }
}

/// Two processes: a shop with three stacks, one of them with a hostile name, and a worker that lost records.
pub fn shop() -> Sample {
    let main = || frame("main", "src/main.cpp", 10);
    let stacks = vec![
        stack(
            2,
            numbers(15 << 20, 12_345, 250.0),
            vec![
                frame("malloc", "", 0),
                frame("operator new(unsigned long)", "", 0),
                frame("shop::create(int)", "src/shop.cpp", 42),
                main(),
            ],
        ),
        stack(
            3,
            Numbers { growth_bytes: 1 << 20, ..numbers(400 << 10, 100, 9000.0) },
            vec![frame("malloc", "", 0), frame("parse\u{1b}[31m", "src/parse.c", 7), main()],
        ),
        StackSample {
            named: Named {
                truncated: Some("no unwind table"),
                ..stack(4, numbers(100, 1, 0.0), vec![frame("calloc", "", 0), frame("init", "", 0)]).named
            },
            ..stack(4, numbers(100, 1, 0.0), vec![])
        },
    ];
    let totals = numbers((15 << 20) + (400 << 10) + 100, 12_446, 9250.0);
    let process = ProcessSample {
        pid: 4242,
        comm: "shop".into(),
        allocators: vec!["glibc".into()],
        end: None,
        totals,
        peak: Peak { bytes: 20 << 20, is_estimate: false },
        source: String::new(),
        unknown_frees: 17,
        heap: Heap::of(&census(), totals.inuse_bytes, Some(70 << 20)),
        lossy: false,
        doubts: Vec::new(),
        notes: Vec::new(),
        stacks_with_value: 3,
        stacks,
    };
    let worker = ProcessSample {
        pid: 4243,
        comm: "worker".into(),
        allocators: vec!["jemalloc".into()],
        end: Some("killed by signal 9".into()),
        totals: Numbers { doubtful_bytes: 512, ..numbers(4096, 4, 0.0) },
        heap: Heap::of(&mappings(), 4096, None),
        lossy: true,
        doubts: vec!["12 free records were lost".into()],
        stacks_with_value: 1,
        stacks: vec![stack(2, numbers(4096, 4, 0.0), vec![frame("malloc", "", 0), frame("work", "src/work.c", 3)])],
        ..process.clone()
    };
    Sample {
        taken_unix_ns: 1_795_257_600_000_000_000,
        elapsed_s: 75.3,
        processes: vec![process, worker],
        losses: vec![Counter::new("lost_allocations", 0, "allocation records lost"), Counter::new("lost_frees", 12, "free records lost")],
    }
}
