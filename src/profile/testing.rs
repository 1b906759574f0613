//! A small profile for tests of the encoders and of the commands.

use super::*;

/// A frame in `shopd`, with an address made from its line.
pub(crate) fn frame(function: &str, line: u32) -> Frame {
    Frame {
        file: "src/shopd.cpp".into(),
        line,
        module: "/usr/bin/shopd".into(),
        build_id: "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00".into(),
        address: 0x1000 + u64::from(line),
        ..Frame::named(function)
    }
}

/// A frame in libc without debug information.
pub(crate) fn libc_frame(function: &str, address: u64) -> Frame {
    Frame { module: "/usr/lib/x86_64-linux-gnu/libc.so.6".into(), build_id: "beef".into(), address, ..Frame::named(function) }
}

fn inlined(frame: Frame) -> Frame {
    Frame { flags: FrameFlags { inlined: true, ..frame.flags }, ..frame }
}

fn guessed(frame: Frame) -> Frame {
    Frame { flags: FrameFlags { guessed: true, ..frame.flags }, ..frame }
}

/// Two processes; a leak, a pinning stack with an inlined frame, a cut walk with a guess, and what is unattributed.
pub(crate) fn shop() -> Profile {
    let meta = Metadata {
        tool: "fragprof 0.1.0".into(),
        mode: Mode::Exact,
        start_unix_ns: 1_795_257_600_000_000_000,
        duration_s: 10.25,
        is_from_start: false,
        survivor_age_s: None,
        kinds: ValueKind::ALL.into_iter().take(9).collect(),
        processes: vec![
            Process {
                pid: 4242,
                comm: "shopd".into(),
                allocators: vec!["glibc 2.36".into()],
                lossy: true,
                peak_inuse_bytes: Some(52 << 20),
                heap: Some(HeapSummary {
                    extent_bytes: Some(96 << 20),
                    resident_bytes: Some(80 << 20),
                    live_bytes: Some(20 << 20),
                    trimmable_bytes: Some(10 << 20),
                    pinned_bytes: Some(50 << 20),
                    unknown_bytes: Some(0),
                }),
                ..Process::default()
            },
            Process { pid: 4243, comm: "shop \"w\"\n".into(), ..Process::default() },
        ],
        losses: vec![Counter::new("lost_alloc", 0, "allocation records lost"), Counter::new("lost_free", 3, "free records lost")],
        governed: Vec::new(),
        stack_ends: vec![Counter::new("complete", 995, "reached the entry"), Counter::new("no_table", 5, "no unwind table")],
        notes: vec!["libpay.so was loaded and probed after 3.0 s".into()],
        limits: vec!["allocations made before the recording are not in the live bytes".into()],
        doubts: vec!["3 frees were lost: live bytes are an upper bound".into()],
        corrections: vec![Counter::new("proven_free", 2, "blocks that a census proved free")],
    };
    let row = |allocs, alloc, inuses, inuse, pinned| {
        Values::default()
            .with(ValueKind::AllocObjects, allocs)
            .with(ValueKind::AllocSpace, alloc)
            .with(ValueKind::InuseObjects, inuses)
            .with(ValueKind::InuseSpace, inuse)
            .with(ValueKind::PinnedSpace, pinned)
    };
    let new = || libc_frame("operator new(unsigned long)", 0xb1000);
    let mut profile = Profile::new(meta);
    profile.add(
        4242,
        &[new(), frame("Session::create(User const&)", 41), frame("Server::login(Request&)", 88), frame("main", 120)],
        None,
        &row(70_000, 18 << 20, 60_000, 15 << 20, 1 << 20).with(ValueKind::PeakSpace, 15 << 20).with(ValueKind::DoubtfulSpace, 4096),
    );
    profile.add(
        4242,
        &[
            libc_frame("malloc", 0xa0000),
            Frame { address: 0x1000 + 61, ..inlined(frame("Buffer::grow(unsigned long)", 12)) },
            frame("Cache::insert(std::string, std::string)", 61),
            frame("main", 121),
        ],
        None,
        &row(500_000, 64 << 20, 3_125, 400 << 10, 48 << 20)
            .with(ValueKind::BlockedSpace, 9 << 20)
            .with(ValueKind::GrowthSpace, 30 << 20)
            .with(ValueKind::PeakSpace, 36 << 20),
    );
    profile.add(
        4243,
        &[libc_frame("malloc", 0xa0000), guessed(frame("worker; \u{1b}[31m<b>\"x\" & y", 7))],
        Some("no_table"),
        &row(10, 1000, 1, 100, 0),
    );
    profile.add(4242, &[], None, &row(0, 0, 0, 0, 77));
    profile
}
