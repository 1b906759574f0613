// Each reader of bytes that somebody else controls, as a function of these bytes. Shared by the fuzz targets and by the test that runs the
// kept corpus and its mutations (tests/faults/readers.rs). A reader may refuse anything; it must neither panic nor contradict itself.

use fragprof::census::core_file::CoreFile;
use fragprof::probe::large::parse_entry;
use fragprof::probe::placement::Emulation;
use fragprof::probe::plan::place_all;
use fragprof::target::allocator::identify;
use fragprof::target::container::{CgroupFile, Membership};
use fragprof::target::elf::Elf;
use fragprof::target::maps::Maps;
use fragprof::target::process::Stat;
use fragprof::target::usdt;
use fragprof::unwind::Table;

/// A reader.
pub type Reader = fn(&[u8]);

/// Each with the folder of its corpus.
pub const READERS: [(&str, Reader); 10] = [
    ("maps", maps),
    ("stat", stat),
    ("cgroup", cgroup),
    ("elf_allocator", elf_allocator),
    ("unwind_file", unwind_file),
    ("perf_map", perf_map),
    ("profile", profile),
    ("record", record),
    ("core_file", core_file),
    ("large_sites", large_sites),
];

/// `/proc/PID/maps`: mapped files' names are the target's.
pub fn maps(bytes: &[u8]) {
    let maps = Maps::parse(bytes);
    assert!(maps.mappings.iter().all(|mapping| mapping.start < mapping.end));
}

/// `/proc/PID/stat`: the command name in it is the target's.
pub fn stat(bytes: &[u8]) {
    let _ = Stat::parse(bytes);
}

/// `/proc/PID/cgroup`: the paths are whoever's made the container.
pub fn cgroup(bytes: &[u8]) {
    for path in CgroupFile::parse(bytes).paths() {
        let _ = Membership::of(path);
    }
}

/// A mapped file: segments, symbols, USDT notes, allocators, probe sites.
pub fn elf_allocator(bytes: &[u8]) {
    let Ok(elf) = Elf::parse(bytes.to_vec()) else { return };
    let found = identify(&elf);
    for site in place_all(&elf, &found.functions, &found.function_starts, Emulation::default()).into_iter().flatten() {
        assert_eq!(elf.offset_of(site.entry_vaddr.wrapping_add(site.placement.offset.into())), Some(site.offset));
    }
    let _ = usdt::probes(&elf, &["otel_memory"]);
}

/// A mapped file's unwind information.
pub fn unwind_file(bytes: &[u8]) {
    if let Ok(table) = Table::read(bytes) {
        assert_eq!(table.to_bytes().len(), table.bytes());
    }
}

/// `/tmp/perf-PID.map`, which the target writes.
pub fn perf_map(bytes: &[u8]) {
    let _ = fragprof::symbol::PerfMap::parse(bytes);
}

/// A profile from somewhere.
pub fn profile(bytes: &[u8]) {
    let _ = fragprof::profile::pprof::read(bytes);
}

/// A record of a ring: written by the kernel's side, but half a record must not pass for one.
pub fn record(bytes: &[u8]) {
    let _ = fragprof::capture::wire::decode(bytes);
}

/// A core file, read by path.
pub fn core_file(bytes: &[u8]) {
    use std::io::Write as _;
    let Ok(mut file) = tempfile::NamedTempFile::new() else { return };
    if file.write_all(bytes).is_ok() {
        let _ = CoreFile::open(file.path());
    }
}

/// A line of what is known of a build of glibc: the cache is the agent's, but what went into it came from the run of a foreign library.
pub fn large_sites(bytes: &[u8]) {
    let Ok(line) = std::str::from_utf8(bytes) else { return };
    if let Some(entry) = parse_entry(line) {
        assert_eq!(entry.line(), line, "what was read says what it was read from");
    }
}
