// Each reader of untrusted bytes, as a function of these bytes. Shared by the fuzz targets and by the test that runs the stored corpus and
// its mutations (tests/faults/readers.rs). A reader may refuse anything; it must neither panic nor contradict itself.

use fragprof::allocator::in_file::identify;
use fragprof::census::core_file::CoreFile;
use fragprof::census::runtime::hotspot::perf_data::Counters;
use fragprof::census::{Fixture, LayoutCache, Level, Options, Pace, take};
use fragprof::emitter::usdt;
use fragprof::probe::placement::Emulation;
use fragprof::probe::plan::place_all;
use fragprof::process::container::{CgroupFile, Membership};
use fragprof::process::elf::Elf;
use fragprof::process::handle::Stat;
use fragprof::process::maps::Maps;
use fragprof::retention::contents::Contents;
use fragprof::selective::parse_entry;
use fragprof::symbol::variables::Variables;
use fragprof::unwind::Table;

/// A reader.
pub type Reader = fn(&[u8]);

/// Each with the folder of its corpus.
pub const READERS: [(&str, Reader); 14] = [
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
    ("heaps", heaps),
    ("perf_data", perf_data),
    ("variables", variables),
    ("types", types),
];

/// `/proc/PID/maps`: the target controls the names of mapped files.
pub fn maps(bytes: &[u8]) {
    let maps = Maps::parse(bytes);
    assert!(maps.mappings.iter().all(|mapping| mapping.start < mapping.end));
}

/// `/proc/PID/stat`: the target controls the command name in it.
pub fn stat(bytes: &[u8]) {
    let _ = Stat::parse(bytes);
}

/// `/proc/PID/cgroup`: whoever created the container controls the paths.
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

/// A record of a ring: written by the BPF programs, but an incomplete record must not be accepted.
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

/// A line with the sites of a build of glibc: the agent wrote the file, but its contents came from the run of a foreign library.
pub fn large_sites(bytes: &[u8]) {
    let Ok(line) = std::str::from_utf8(bytes) else { return };
    if let Some(entry) = parse_entry(line) {
        assert_eq!(entry.line(), line, "an entry writes the line that it was read from");
    }
}

/// The mappings of a process that has every runtime at once.
const EVERY_RUNTIME: &[u8] = b"7f0000000000-7f0000001000 r--p 00000000 08:01 5 /usr/bin/python3.11\n\
    7f0000001000-7f0000003000 rw-p 00001000 08:01 5 /usr/bin/python3.11\n\
    7f0000010000-7f0000011000 r--p 00000000 08:01 6 /usr/bin/php\n\
    7f0000020000-7f0000021000 r--p 00000000 08:01 7 /usr/bin/node\n\
    7f0000030000-7f0000031000 r--p 00000000 08:01 8 /usr/bin/ruby\n\
    7f0000040000-7f0000041000 r--p 00000000 08:01 9 /usr/sbin/mariadbd\n\
    7f0000050000-7f0000052000 rw-p 00000000 08:01 10 /usr/bin/held\n\
    7f0100000000-7f0108000000 rw-p 00000000 00:00 0\n";

/// Memory that is searched for the structures of allocators and runtimes, as words with their addresses: the target controls all of it.
pub fn heaps(bytes: &[u8]) {
    let maps = Maps::parse(EVERY_RUNTIME);
    let is_mapped = |addr: u64| maps.mappings.iter().any(|one| one.start.0 <= addr && addr < one.end.0);
    let mut memory = Fixture::with_maps(maps.clone());
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    for pair in bytes.chunks_exact(16).take(4096) {
        let (addr, value) = (word(&pair[..8]), word(&pair[8..]));
        if is_mapped(addr) {
            memory.write_word(addr, value);
        }
    }
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: true };
    let Ok(taken) = take(&memory, 1, "held", options, &mut LayoutCache::default()) else { return };
    for found in &taken.census.runtimes.memory {
        assert!(found.pieces > 0 && found.resident_bytes <= found.extent_bytes, "{found:?}");
    }
}

/// A JVM's counters: the target controls the file.
pub fn perf_data(bytes: &[u8]) {
    let _ = Counters::parse(bytes);
}

/// A mapped file's debug information: variables, types, members.
pub fn variables(bytes: &[u8]) {
    let Ok(elf) = Elf::parse(bytes.to_vec()) else { return };
    let mut symbols = Vec::new();
    elf.for_each_variable(|_, vaddr, _| symbols.push(vaddr));
    let Some(mut found) = Variables::read(&elf) else { return };
    for vaddr in symbols.into_iter().take(16) {
        let Some(variable) = found.global(vaddr) else { continue };
        let mut of = Some(variable.type_id);
        for offset in (0..64).step_by(8) {
            of = of.and_then(|of| found.member(of, offset).pointee.or(Some(of)));
        }
        let _ = of.and_then(|of| found.size_of(of));
    }
    for segment in elf.segments().iter().filter(|segment| segment.executable).take(2) {
        for pc in (0..64).map(|step| segment.vaddr.wrapping_add(step * 8)) {
            let _ = found.local(pc, -24);
        }
    }
}

/// Words that are searched for virtual tables, the classes' descriptions and their names: the target controls all of it.
pub fn types(bytes: &[u8]) {
    const TABLES: &[u8] = b"7f0000000000-7f0000010000 r--p 00000000 08:01 5 /usr/bin/held\n\
        7f0000010000-7f0000020000 rw-p 00010000 08:01 5 /usr/bin/held\n";
    let maps = Maps::parse(TABLES);
    let mut memory = Fixture::with_maps(maps.clone());
    memory.write(0x7f00_0000_0000, bytes.get(..bytes.len().min(0x2_0000)).unwrap_or_default());
    let mut contents = Contents::of(&memory, &maps, &[]);
    for addr in (0x7f00_0000_0000..0x7f00_0000_2000u64).step_by(8) {
        let kind = contents.kind(&addr.to_le_bytes());
        assert!(kind.type_name.is_none_or(|name| !name.is_empty()));
    }
}
