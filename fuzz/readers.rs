// Each reader of untrusted bytes, as a function of these bytes. Shared by the fuzz targets and by the test that runs the stored corpus and
// its mutations (tests/faults/readers.rs). A reader may refuse anything; it must neither panic nor contradict itself.

use fragprof::agent::delivery::decide::{adjustment, is_wanted};
use fragprof::agent::delivery::messages::{ConfigureRequest, ContainerAdjustment, CreateContainerRequest};
use fragprof::agent::delivery::{frame, plugin};
use fragprof::allocator::in_file::identify;
use fragprof::bpf::{
    FRAME_CODE_BITS, FRAME_KIND_BIT, FrameKind, PYTHON_OUTERMOST, PythonCode, PythonFrame, PythonText, RING_ADDRESS_BITS, RING_CELL_BYTES,
    RING_CHUNK_BYTES, RING_HEADER_BYTES, RING_PROCESSES, RingProcess,
};
use fragprof::census::core_file::CoreFile;
use fragprof::census::runtime::hotspot::perf_data::Counters;
use fragprof::census::runtime::hotspot::structs::{Library, LibraryFile};
use fragprof::census::{Fixture, LayoutCache, Level, Memory as _, Options, Pace, Taken, ThreadState, take};
use fragprof::emitter::usdt;
use fragprof::managed::cpython::layout::{Layout, Version};
use fragprof::managed::cpython::{Definition, Python};
use fragprof::managed::hotspot::native::Reader as JvmReader;
use fragprof::managed::hotspot::{Refusal, Starting};
use fragprof::probe::placement::Emulation;
use fragprof::probe::plan::place_all;
use fragprof::process::container::{CgroupFile, Membership};
use fragprof::process::elf::Elf;
use fragprof::process::handle::Stat;
use fragprof::process::maps::Maps;
use fragprof::retention::contents::Contents;
use fragprof::ring::{Announced, Counts, Event, Memory, Reader as RingReader, Receiver};
use fragprof::sampler::image::{ImageFit, Libc, examine};
use fragprof::sampler::library::Flavour;
use fragprof::sampler::root::Root;
use fragprof::sampler::unit::syntax;
use fragprof::selective::parse_entry;
use fragprof::symbol::NamedFrames;
use fragprof::symbol::variables::Variables;
use fragprof::trace::codec::{Bytes, State};
use fragprof::units::StackHash;
use fragprof::unwind::Table;
use zerocopy::{FromBytes as _, FromZeros as _, IntoBytes as _};

/// A reader.
pub type Reader = fn(&[u8]);

/// Each with the folder of its corpus.
pub const READERS: [(&str, Reader); 29] = [
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
    ("hotspot", hotspot),
    ("jvm_memory", jvm_memory),
    ("cpython", cpython),
    ("pymalloc", pymalloc),
    ("mimalloc", mimalloc),
    ("mimalloc_arenas", mimalloc_arenas),
    ("google_tcmalloc", google_tcmalloc),
    ("trace", trace),
    ("foreign_trace", foreign_trace),
    ("ring", ring),
    ("environment", environment),
    ("prometheus", prometheus),
    ("nri", nri),
    ("unit_file", unit_file),
    ("image", image),
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

/// `/proc/PID/environ`: the target controls it.
pub fn environment(bytes: &[u8]) {
    let named = fragprof::process::workload::environment::parse(bytes);
    let texts = named.service_name.iter().chain(&named.service_version);
    assert!(texts.flat_map(|text| text.chars()).all(|one| !one.is_control()));
}

/// The answer of a Prometheus to `top --prometheus`.
pub fn prometheus(bytes: &[u8]) {
    for recorded in [false, true] {
        if let Ok(view) = fragprof::tui::cluster::read(bytes, recorded) {
            let page = fragprof::tui::cluster::page(&view, 10);
            assert!(page.chars().all(|one| one == '\n' || !one.is_control()));
        }
    }
    let _ = fragprof::tui::cluster::refusal(bytes);
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

/// A container runtime that answers anything, and asks for anything.
struct Asked;

impl plugin::Handler for Asked {
    fn connected(&mut self, _: &ConfigureRequest) {}
    fn create(&mut self, request: &CreateContainerRequest) -> Option<ContainerAdjustment> {
        let (pod, container) = (request.pod.as_ref()?, request.container.as_ref()?);
        let _ = is_wanted(pod, "fragprof.io/sampler", &[]);
        let fit = ImageFit { program: "/x".into(), libc: Libc::Musl, flavour: Flavour::Standard, doubts: Vec::new() };
        Some(adjustment(container, &fit, std::path::Path::new("/node"), 4096))
    }
    fn not_understood(&mut self, _: &str) {}
    fn goes_on(&mut self) -> bool {
        false
    }
}

/// What comes from the socket of a container runtime.
pub fn nri(bytes: &[u8]) {
    let mut reader = frame::Reader::default();
    for part in bytes.chunks(97) {
        if reader.push(part).is_err() {
            return;
        }
        while let Some(message) = reader.next_message() {
            let response = plugin::answer(&message.payload, &mut Asked);
            let _ = prost::Message::encode_to_vec(&response);
        }
        assert!(reader.held_bytes() <= bytes.len());
    }
}

/// A unit's file, and an environment file.
pub fn unit_file(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let name = "web-app@blue.service".parse().expect("it is a name");
    for (_, value) in syntax::assignments(text, "Service") {
        for word in syntax::words(&value) {
            let _ = syntax::expanded(&word, &name);
        }
    }
    if let Some(value) = syntax::variable_of_file(text, "LD_PRELOAD").filter(|value| !value.contains(['\n', '\r'])) {
        assert_eq!(syntax::variable_of_file(&syntax::quoted_line("LD_PRELOAD", &value), "LD_PRELOAD"), Some(value));
    }
}

/// The program of an image.
pub fn image(bytes: &[u8]) {
    use std::os::unix::fs::PermissionsExt as _;
    let Ok(directory) = tempfile::tempdir() else { return };
    let path = directory.path().join("program");
    let mode = std::fs::Permissions::from_mode(0o755);
    if std::fs::write(&path, bytes).and_then(|()| std::fs::set_permissions(&path, mode)).is_ok() {
        let _ = examine(&Root::directory(directory.path()), &["/program".into()], "/");
    }
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

/// Where the JVM below lies, and its parts.
const JVM: u64 = 0x7f00_0000_0000;
const JVM_BYTES: u64 = 0x4_0000;
const JVM_VARIABLES: u64 = JVM;
const JVM_STRUCTS: u64 = JVM + 0x1000;
const JVM_TYPES: u64 = JVM + 0x4000;
const JVM_DATA: u64 = JVM + 0x5000;
const JVM_SEGMENTS: u64 = JVM + 0x8000;
const JVM_CODE: u64 = JVM + 0x1_0000;

/// A library whose texts are where they are said to be.
#[derive(Default)]
struct Described {
    texts: Vec<Vec<u8>>,
    variables: Vec<&'static str>,
}

impl Described {
    /// The address of a text: the process has none of them in memory.
    fn text(&mut self, text: &str) -> u64 {
        self.texts.push([text.as_bytes(), b"\0"].concat());
        0x1000 + self.texts.len() as u64
    }
}

impl LibraryFile for Described {
    fn variable_vaddr(&self, name: &[u8]) -> Option<u64> {
        let at = self.variables.iter().position(|variable| variable.as_bytes() == name)?;
        Some(JVM_VARIABLES + 8 * at as u64)
    }

    fn bytes_at(&self, vaddr: u64, bytes_max: u64) -> Vec<u8> {
        let text = vaddr.checked_sub(0x1001).and_then(|at| self.texts.get(usize::try_from(at).ok()?)).cloned().unwrap_or_default();
        text.into_iter().take(bytes_max as usize).collect()
    }
}

/// A JVM as JDK 25 lays it out: an interpreter, and a compiled method into which another one is inlined.
fn jvm() -> (Fixture, Described) {
    let maps = Maps::parse(format!("{JVM:x}-{:x} rw-p 00000000 00:00 0\n", JVM + JVM_BYTES).as_bytes());
    let (mut memory, mut library) = (Fixture::with_maps(maps), Described::default());
    let variables = [
        ("gHotSpotVMStructs", JVM_STRUCTS),
        ("gHotSpotVMStructEntryArrayStride", 32),
        ("gHotSpotVMStructEntryTypeNameOffset", 0),
        ("gHotSpotVMStructEntryFieldNameOffset", 8),
        ("gHotSpotVMStructEntryOffsetOffset", 16),
        ("gHotSpotVMStructEntryAddressOffset", 24),
        ("gHotSpotVMTypes", JVM_TYPES),
        ("gHotSpotVMTypeEntryArrayStride", 16),
        ("gHotSpotVMTypeEntryTypeNameOffset", 0),
        ("gHotSpotVMTypeEntrySizeOffset", 8),
    ];
    for (at, (name, value)) in variables.into_iter().enumerate() {
        library.variables.push(name);
        memory.write_word(JVM_VARIABLES + 8 * at as u64, value);
    }
    // Static fields have a place in JVM_DATA.
    let (version, heaps, low, interpreter, call_stub, continuation) =
        (JVM_DATA, JVM_DATA + 8, JVM_DATA + 16, JVM_DATA + 24, JVM_DATA + 32, JVM_DATA + 40);
    let fields: [(&str, &str, u64, u64); 60] = [
        ("Abstract_VM_Version", "_vm_major_version", 0, version),
        ("CodeCache", "_heaps", 0, heaps),
        ("CodeCache", "_low_bound", 0, low),
        ("AbstractInterpreter", "_code", 0, interpreter),
        ("StubRoutines", "_call_stub_return_address", 0, call_stub),
        ("ContinuationEntry", "_return_pc", 0, continuation),
        ("GrowableArrayBase", "_len", 0, 0),
        ("GrowableArray<int>", "_data", 8, 0),
        ("VirtualSpace", "_low_boundary", 0, 0),
        ("VirtualSpace", "_high_boundary", 8, 0),
        ("VirtualSpace", "_low", 16, 0),
        ("VirtualSpace", "_high", 24, 0),
        ("CodeHeap", "_memory", 0, 0),
        ("CodeHeap", "_segmap", 112, 0),
        ("CodeHeap", "_log2_segment_size", 248, 0),
        ("StubQueue", "_stub_buffer", 8, 0),
        ("CodeBlob", "_name", 8, 0),
        ("CodeBlob", "_frame_size", 44, 0),
        ("CodeBlob", "_code_offset", 36, 0),
        ("CodeBlob", "_data_offset", 40, 0),
        ("CodeBlob", "_mutable_data", 16, 0),
        ("CodeBlob", "_mutable_data_size", 48, 0),
        ("CodeBlob", "_relocation_size", 28, 0),
        ("nmethod", "_method", 80, 0),
        ("nmethod", "_compile_id", 212, 0),
        ("nmethod", "_orig_pc_offset", 208, 0),
        ("nmethod", "_deopt_handler_offset", 176, 0),
        ("nmethod", "_deopt_mh_handler_offset", 180, 0),
        ("nmethod", "_immutable_data", 96, 0),
        ("nmethod", "_immutable_data_size", 160, 0),
        ("nmethod", "_scopes_pcs_offset", 196, 0),
        ("nmethod", "_scopes_data_offset", 200, 0),
        ("PcDesc", "_pc_offset", 0, 0),
        ("PcDesc", "_scope_decode_offset", 4, 0),
        ("Method", "_constMethod", 8, 0),
        ("ConstMethod", "_constants", 8, 0),
        ("ConstMethod", "_constMethod_size", 24, 0),
        ("ConstMethod", "_flags._flags", 28, 0),
        ("ConstMethod", "_code_size", 34, 0),
        ("ConstMethod", "_name_index", 36, 0),
        ("ConstMethod", "_signature_index", 38, 0),
        ("ConstantPool", "_pool_holder", 24, 0),
        ("ConstantPool", "_source_file_name_index", 54, 0),
        ("Klass", "_name", 24, 0),
        ("Symbol", "_length", 4, 0),
        ("Symbol", "_body", 6, 0),
        ("ThreadsSMRSupport", "_java_thread_list", 0, JVM_DATA + 48),
        ("ThreadsList", "_length", 4, 0),
        ("ThreadsList", "_threads", 16, 0),
        ("JavaThread", "_stack_base", 0, 0),
        ("JavaThread", "_stack_size", 8, 0),
        ("ClassLoaderDataGraph", "_head", 0, JVM_DATA + 56),
        ("ClassLoaderData", "_class_loader", 8, 0),
        ("ClassLoaderData", "_next", 112, 0),
        ("ClassLoaderData", "_klasses", 56, 0),
        ("Klass", "_next_link", 144, 0),
        ("Klass", "_java_mirror", 112, 0),
        ("InstanceKlass", "_constants", 224, 0),
        ("InstanceKlass", "_fieldinfo_stream", 448, 0),
        ("Array<u1>", "_data", 4, 0),
    ];
    for (at, (owner, field, offset, address)) in fields.into_iter().enumerate() {
        let entry = JVM_STRUCTS + 32 * at as u64;
        for (word, value) in [library.text(owner), library.text(field), offset, address].into_iter().enumerate() {
            memory.write_word(entry + 8 * word as u64, value);
        }
    }
    for (at, (name, size)) in [("HeapBlock", 8), ("PcDesc", 16), ("ConstMethod", 56), ("ConstantPool", 72)].into_iter().enumerate() {
        let entry = JVM_TYPES + 16 * at as u64;
        memory.write_word(entry, library.text(name));
        memory.write_word(entry + 8, size);
    }
    let (array, heap, queue) = (JVM_DATA + 0x100, JVM_DATA + 0x200, JVM_DATA + 0x400);
    let data = [(version, 25), (heaps, array), (low, JVM_CODE), (interpreter, queue), (call_stub, JVM_CODE + 0x180)];
    let list = [(array, 1), (array + 8, array + 16), (array + 16, heap)];
    let heap = [(heap, JVM_CODE), (heap + 8, JVM_CODE + 0x2_0000), (heap + 112, JVM_SEGMENTS), (heap + 248, 7)];
    let queue = [(queue + 8, JVM_CODE + 0x120)];
    for (address, value) in data.into_iter().chain(list).chain(heap).chain(queue) {
        memory.write_word(address, value);
    }
    // Two blobs of 8 segments each, the second one a compiled method. Names are texts of the process.
    let tags: Vec<u8> = (0..8).chain(0..8).chain(std::iter::repeat_n(0xff, 0x400 - 16)).collect();
    memory.write(JVM_SEGMENTS, &tags);
    let names = JVM_DATA + 0x600;
    memory.write(names, b"Interpreter\0nmethod\0native nmethod\0");
    for (blob, name) in [(JVM_CODE + 8, names), (JVM_CODE + 0x408, names + 12)] {
        memory.write_word(blob - 8, 8 | 1 << 32);
        memory.write_word(blob + 8, name);
        // Code and its end, of 32 bits each; the frame.
        memory.write(blob + 36, &[0x00, 1, 0, 0, 0xf8, 3, 0, 0, 6, 0, 0, 0]);
    }
    let method = JVM_CODE + 0x408;
    // A method and one inlined into it, at 0x10 of the code: index 2 in `outer`, 4 in `inner`. Numbers are stored plus 1.
    let (tables, metadata, outer, inner) = (JVM_DATA + 0x800, JVM_DATA + 0xa00, JVM_DATA + 0xb00, JVM_DATA + 0xc00);
    memory.write(tables, &[0x10, 0, 0, 0, 4, 0, 0, 0]);
    memory.write(tables + 16, &[0, 1, 2, 4, 2, 3, 6]);
    for (offset, value) in [(16, metadata), (80, outer), (96, tables)] {
        memory.write_word(method + offset, value);
    }
    memory.write(method + 48, &16u32.to_le_bytes());
    memory.write(method + 160, &32u32.to_le_bytes());
    memory.write(method + 196, &[0, 0, 0, 0, 16, 0, 0, 0]);
    memory.write(method + 212, &7u32.to_le_bytes());
    memory.write_word(metadata, outer);
    memory.write_word(metadata + 8, inner);
    let pool = JVM_DATA + 0xd00;
    let symbol = |memory: &mut Fixture, at: u64, text: &str| {
        memory.write(at + 4, &(text.len() as u16).to_le_bytes());
        memory.write(at + 6, text.as_bytes());
    };
    for (at, text) in ["shop/Cart", "add", "check", "Cart.java"].into_iter().enumerate() {
        symbol(&mut memory, JVM_DATA + 0xe00 + 32 * at as u64, text);
        memory.write_word(pool + 72 + 8 * at as u64, JVM_DATA + 0xe00 + 32 * at as u64);
    }
    memory.write_word(pool + 24, pool + 0x80);
    memory.write_word(pool + 0x80 + 24, JVM_DATA + 0xe00);
    memory.write(pool + 54, &3u16.to_le_bytes());
    for (at, name) in [(outer, 1u16), (inner, 2)] {
        let unchanging = at + 0x40;
        memory.write_word(at + 8, unchanging);
        memory.write_word(unchanging + 8, pool);
        // 80 bytes in all, with lines; 10 of code.
        memory.write(unchanging + 24, &[10, 0, 0, 0, 1, 0, 0, 0, 0, 0, 10, 0]);
        memory.write(unchanging + 36, &name.to_le_bytes());
        // Index 0 is line 5, index 3 line 7.
        memory.write(unchanging + 56 + 10, &[5, 3 << 3 | 2, 0]);
    }
    (memory, library)
}

/// Adds to the JVM what its native memory is read from: a code heap's committed part, a thread's stack, the class that counts direct buffers.
fn add_memory(memory: &mut Fixture) {
    let (heap, threads, loader) = (JVM_DATA + 0x200, JVM_DATA + 0x1400, JVM_DATA + 0x1500);
    let (bits, counter, texts) = (JVM_DATA + 0x1600, JVM_DATA + 0x1800, JVM_DATA + 0x1a00);
    let (objects, pools, lists) = (JVM_DATA + 0x1c00, JVM_DATA + 0x1e00, JVM_DATA + 0x2000);
    let code = [(heap + 16, JVM_CODE), (heap + 24, JVM_CODE + 0x1000)];
    let segments = [(heap + 120, JVM_SEGMENTS + 0x400), (heap + 128, JVM_SEGMENTS), (heap + 136, JVM_SEGMENTS + 0x20)];
    let stacks = [(JVM_DATA + 48, threads), (threads + 16, threads + 0x40), (threads + 0x40, threads + 0x80)];
    let stack = [(threads + 0x80, JVM + 0x3_8000), (threads + 0x88, 0x8000)];
    let classes = [(JVM_DATA + 56, loader), (loader + 56, bits), (bits + 144, counter)];
    for (address, value) in code.into_iter().chain(segments).chain(stacks).chain(stack).chain(classes) {
        memory.write_word(address, value);
    }
    memory.write(threads + 4, &1u32.to_le_bytes());
    let names = ["java/nio/Bits", "java/util/concurrent/atomic/AtomicLong", "RESERVED_MEMORY", "COUNT", "value"];
    for (at, name) in names.into_iter().enumerate() {
        memory.write(texts + 64 * at as u64 + 4, &(name.len() as u16).to_le_bytes());
        memory.write(texts + 64 * at as u64 + 6, name.as_bytes());
    }
    // Each class with its own object, its constants (two names), and its fields at 16 and 24; numbers are stored plus 1.
    for (at, class) in [bits, counter].into_iter().enumerate() {
        let (at, pool) = (at as u64, pools + 0x80 * at as u64);
        for (offset, value) in [(24, texts + 64 * at), (112, objects + 0x80 * at), (224, pool), (448, lists + 0x40 * at)] {
            memory.write_word(class + offset, value);
        }
        memory.write_word(objects + 0x80 * at, objects + 0x80 * at + 16);
        memory.write_word(pool + 72, texts + 64 * (2 + 2 * at));
        memory.write_word(pool + 80, texts + 64 * 3);
        memory.write(lists + 0x40 * at, &12u32.to_le_bytes());
        memory.write(lists + 0x40 * at + 4, &[3, 1, 1, 1, 17, 9, 1, 2, 1, 25, 9, 1]);
    }
    let own = objects + 16;
    for (address, value) in [(own + 16, objects + 0x100), (own + 24, objects + 0x120), (objects + 0x110, 4096), (objects + 0x130, 3)] {
        memory.write_word(address, value);
    }
    memory.write(JVM_DATA, &25u32.to_le_bytes());
}

/// What a JVM's native memory is read from: the target controls all of it.
pub fn jvm_memory(bytes: &[u8]) {
    let (mut memory, library) = jvm();
    add_memory(&mut memory);
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]])) * 4 % (JVM_BYTES - 8);
        memory.write(JVM + place, &pair[2..]);
    }
    let Ok(maps) = memory.maps() else { return };
    let Ok(mut reader) = JvmReader::of(&Library { memory: &memory, elf: &library, bias: 0 }) else {
        assert!(!bytes.is_empty());
        return;
    };
    let threads = [ThreadState { stack_pointer: Some(JVM + 0x10), ..ThreadState::default() }];
    let parts = reader.parts(&memory, &maps, &threads[..usize::from(!bytes.is_empty())]);
    for part in &parts {
        assert!(part.committed_bytes.is_none_or(|committed| committed <= 8 * (8 << 30)), "{part:?}");
    }
    if bytes.is_empty() {
        let seen: Vec<_> =
            parts.iter().map(|part| (part.name, part.reserved_bytes, part.committed_bytes, part.used_bytes, part.count)).collect();
        assert_eq!(
            seen,
            [
                ("code_cache", Some(0x2_0400), Some(0x1020), None, Some(1)),
                ("thread_stacks", Some(0x8000), None, None, Some(1)),
                ("direct_buffers", None, None, Some(4096), Some(3)),
            ]
        );
    }
}

/// A JVM's description of itself, its code and its methods: the target controls all of it.
pub fn hotspot(bytes: &[u8]) {
    let (mut memory, library) = jvm();
    let word = |bytes: &[u8]| bytes.try_into().map_or(0, u64::from_le_bytes);
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]])) * 4 % (JVM_BYTES - 8);
        memory.write(JVM + place, &word(&pair[2..]).to_le_bytes());
    }
    let started = Starting::of(&Library { memory: &memory, elf: &library, bias: 0 }).and_then(|starting| starting.begin(&memory));
    let Ok(mut jvm) = started else {
        assert!(!bytes.is_empty(), "{:?}", started.err().unwrap_or(Refusal::Unknown));
        return;
    };
    assert!(jvm.mappings().all(|mapping| mapping.begin < mapping.end));
    let kind = |kind: FrameKind| (kind as u64) << FRAME_KIND_BIT;
    let compiled = |distance: u64| kind(FrameKind::JavaCompiled) | 7 << FRAME_CODE_BITS | distance;
    let interpreted = kind(FrameKind::JavaInterpreted) | (JVM_DATA + 0xb00) >> 3 << 16 | (JVM_DATA + 0xb00 + 0x40 + 56 + 4) & 0xffff;
    let mut named = |word: u64| {
        let frames = jvm.frames(&memory, word);
        assert!(!frames.is_empty() && frames.iter().all(|frame| !frame.function.is_empty()));
        frames.iter().map(|frame| format!("{} {}:{}", frame.function, frame.file, frame.line)).collect::<Vec<_>>().join(", ")
    };
    let whole = [named(compiled(0x518)), named(interpreted), named(kind(FrameKind::JavaStub) | (JVM_CODE + 0x130))];
    if bytes.is_empty() {
        let cart = "shop/Cart.java";
        assert_eq!(
            whole,
            [format!("shop.Cart.check {cart}:7, shop.Cart.add {cart}:5"), format!("shop.Cart.add {cart}:7"), "[Interpreter] :0".into()]
        );
    }
    for distance in (0..JVM_BYTES).step_by(0x88) {
        named(compiled(distance));
        named(kind(FrameKind::JavaStub) | (JVM_CODE + distance));
        named(kind(FrameKind::JavaInterpreted) | (JVM + distance) >> 3 << 16 | distance & 0xffff);
    }
    named(u64::MAX >> 1);
}

/// Memory of a CPython: its description of itself, a code object, its texts and its table of lines; then what was sent of it.
const PYTHON: u64 = 0x7f20_0000_0000;
const PYTHON_CODE: u64 = PYTHON + 0x400;
const PYTHON_NAME: u64 = PYTHON + 0x600;
const PYTHON_FILE: u64 = PYTHON + 0x700;
const PYTHON_LINES: u64 = PYTHON + 0x800;
const PYTHON_SENT: u64 = PYTHON + 0xa00;
const PYTHON_SENT_FRAMES: u64 = PYTHON + 0xf00;
const PYTHON_BYTES: u64 = 0x1000;

/// A CPython 3.13, as its `_Py_DebugOffsets` describe it.
fn python_memory() -> Vec<u8> {
    let mut memory = vec![0; PYTHON_BYTES as usize];
    let mut put = |address: u64, bytes: &[u8]| memory[(address - PYTHON) as usize..][..bytes.len()].copy_from_slice(bytes);
    put(PYTHON, b"xdebugpy");
    let words = [(1, 0x030d_00f0), (5, 632), (8, 7264), (9, 7344), (21, 8), (23, 72), (24, 152), (29, 8), (30, 0), (31, 56), (33, 70)];
    let more = [(35, 112), (36, 120), (37, 128), (38, 136), (39, 68), (43, 200), (70, 40)];
    for (at, word) in words.into_iter().chain(more) {
        put(PYTHON + 8 * at, &u64::to_le_bytes(word));
    }
    // A text of which the process sends nothing, and a table of which it sends the beginning.
    for (object, text) in [(PYTHON_NAME, "Cart.add"), (PYTHON_FILE, "cart.py")] {
        put(object + 16, &(text.len() as u64).to_le_bytes());
        put(object + 32, &[1 << 2 | 1 << 5 | 1 << 6]);
        put(object + 40, text.as_bytes());
    }
    let lines = [0x80, 0, 0x80 | 11 << 3 | 1, 0, 0, 0x80 | 13 << 3, 2 << 1, 0x80];
    put(PYTHON_LINES + 16, &(lines.len() as u64).to_le_bytes());
    put(PYTHON_LINES + 32, &lines);
    for (at, value) in [(112, PYTHON_FILE), (128, PYTHON_NAME), (136, PYTHON_LINES), (68, 7)] {
        put(PYTHON_CODE + at, &value.to_le_bytes());
    }
    let text = |object: u64, length: u64| PythonText { object, length, state: 25, bytes: 0 };
    let mut code = PythonCode::new_zeroed();
    (code.code, code.first_line) = (PYTHON_CODE, 7);
    (code.name, code.file) = (text(PYTHON_NAME, 8), text(PYTHON_FILE, 7));
    code.lines = PythonText { object: PYTHON_LINES, length: lines.len() as u64, state: 0, bytes: 2 };
    put(PYTHON_SENT, code.as_bytes());
    put(PYTHON_SENT + size_of::<PythonCode>() as u64, &lines[..2]);
    let frame = |instruction, native| PythonFrame { code: PYTHON_CODE, instruction, native, flags: PYTHON_OUTERMOST as u16 };
    put(PYTHON_SENT_FRAMES, [frame(0, 1), frame(4, 0xffff)].as_bytes());
    memory
}

/// A CPython's description of itself, its code objects, and what is sent of them: the target controls all of it.
pub fn cpython(bytes: &[u8]) {
    let mut whole = python_memory();
    for pair in bytes.chunks_exact(10).take(256) {
        let place = usize::from(u16::from_le_bytes([pair[0], pair[1]])) % (whole.len() - 8);
        whole[place..place + 8].copy_from_slice(&pair[2..]);
    }
    let maps = Maps::parse(format!("{PYTHON:x}-{:x} rw-p 00000000 00:00 0\n", PYTHON + PYTHON_BYTES).as_bytes());
    let mut memory = Fixture::with_maps(maps);
    memory.write(PYTHON, &whole);
    let version = Version { minor: 13, micro: Some(0) };
    let Ok(mut layout) = Layout::of(version, &whole) else {
        assert!(!bytes.is_empty());
        return;
    };
    (layout.record.eval_begin, layout.record.eval_end) = (0x5000, 0x6000);
    let mut python = Python::with_layout(version, layout);
    let part = |address: u64| &whole[(address - PYTHON) as usize..];
    let Ok((sent, lines)) = PythonCode::read_from_prefix(part(PYTHON_SENT)) else { return };
    let lines = lines.get(..(sent.lines.bytes as usize).min(lines.len())).unwrap_or_default();
    python.define(&memory, Definition { code: &sent, lines });
    // The rest of the table could not be sent.
    let mut rest = sent;
    (rest.lines_at, rest.lines.bytes) = (sent.lines.bytes, 0);
    python.define(&memory, Definition { code: &rest, lines: &[] });
    let frames: Vec<PythonFrame> =
        part(PYTHON_SENT_FRAMES).chunks_exact(16).filter_map(|frame| PythonFrame::read_from_bytes(frame).ok()).collect();
    let count = if bytes.is_empty() { 2 } else { frames.len() };
    let names = NamedFrames::default();
    for end in 0..4 {
        python.hold(StackHash(9), &frames[..count], end);
        let words = [0x1000, 0x5010, 0x1010, 0x5020, 0x1020];
        let named = python.stack(&names, StackHash(9), &words, false).unwrap_or_default();
        assert!(named.len() >= count && named.len() <= words.len() + count + 1);
        let name = |word: &u64| match names.get(*word) {
            Some(frames) => frames.iter().map(|frame| format!("{} {}:{}", frame.function, frame.file, frame.line)).collect::<String>(),
            None => format!("{word:x}"),
        };
        let named: Vec<String> = named.iter().map(name).collect();
        if bytes.is_empty() && end == 0 {
            assert_eq!(named, ["1000", "Cart.add cart.py:7", "1010", "Cart.add cart.py:8", "1020"]);
        }
    }
}

/// An interpreter with one arena, its table and two pools of it.
const ARENA_PYTHON: u64 = 0x7f30_0000_0000;
const ARENA_TABLE: u64 = 0x7f30_0001_0010;
const ARENA: u64 = 0x7f30_0010_0000;
const ARENA_MAPS: &[u8] = b"7f3000000000-7f3000001000 r--p 00000000 08:01 5 /usr/bin/python3.11\n\
    7f3000001000-7f3000002000 rw-p 00001000 08:01 5 /usr/bin/python3.11\n\
    7f3000010000-7f3000011000 rw-p 00000000 00:00 0\n\
    7f3000100000-7f3000140000 rw-p 00000000 00:00 0\n";

fn pool_of(arena: u64, class: u32, begun: u32, free: &[u32]) -> Vec<u8> {
    let (bytes, mut pool) = ((class + 1) * 16, vec![0; 4096]);
    let mut link = 8;
    for &index in free {
        let at = 48 + index * bytes;
        pool[link..link + 8].copy_from_slice(&(arena + u64::from(at)).to_le_bytes());
        link = at as usize;
    }
    for (at, value) in [(0, begun - free.len() as u32), (36, class), (40, 48 + begun * bytes), (44, 4096 - bytes)] {
        pool[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    pool
}

/// CPython's arenas and pools: pairs of a place and a word, of the table first, then of the pools.
pub fn pymalloc(bytes: &[u8]) {
    let mut memory = Fixture::with_maps(Maps::parse(ARENA_MAPS));
    memory.write_word(ARENA_PYTHON + 0x1800, ARENA_TABLE);
    let table = [ARENA, ARENA + 3 * 4096, 62 | 64 << 32, ARENA + 2 * 4096, 0, 0];
    for (at, word) in table.into_iter().enumerate() {
        memory.write_word(ARENA_TABLE + 8 * at as u64, word);
    }
    memory.write(ARENA, &pool_of(ARENA, 3, 5, &[2, 0]));
    memory.write(ARENA + 4096, &pool_of(ARENA + 4096, 31, 7, &[]));
    memory.write(ARENA + 2 * 4096, &pool_of(ARENA + 2 * 4096, 0, 2, &[1, 0]));
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]])) % 0x3300;
        let start = if place < 0x300 { ARENA_TABLE - 0x10 } else { ARENA - 0x300 };
        memory.write(start + place, &pair[2..]);
    }
    let Some(taken) = at_every_level(&memory, "python") else { return };
    if bytes.is_empty() {
        let live: Vec<_> = taken.census.heaps.iter().map(|heap| (heap.ladder.live_bytes, heap.live_allocations)).collect();
        assert_eq!(live, [(Some(3 * 64 + 7 * 512), Some(10))]);
    }
}

/// The full census of this memory, which must balance, after one at each other level.
fn at_every_level(memory: &Fixture, name: &str) -> Option<Taken> {
    let options = Options { level: Level::Full, pace: Pace::default(), with_not_malloc: true };
    for level in [Level::Top, Level::Sampled] {
        let _ = take(memory, 1, name, Options { level, ..options }, &mut LayoutCache::default());
    }
    let taken = take(memory, 1, name, options, &mut LayoutCache::default()).ok()?;
    for heap in &taken.census.heaps {
        assert!(heap.off_balance_bytes() == Some(0) || !taken.census.walk.usable, "{heap:?}");
    }
    Some(taken)
}

/// A segment of mimalloc 2.0 with a page of 64-byte blocks and one of 10,000 bytes, and the heap that owns them.
const SEGMENT: u64 = 0x7f40_0000_0000;
const SEGMENT_HEAP: u64 = 0x7f40_0200_0000;
const SEGMENT_MAPS: &[u8] = b"7f4000000000-7f4002001000 rw-p 00000000 00:00 0\n";

/// mimalloc's segments, pages and lists: pairs of a place and a word, of the header first, then of the blocks.
pub fn mimalloc(bytes: &[u8]) {
    let mut memory = Fixture::with_maps(Maps::parse(SEGMENT_MAPS));
    // Cookie, segment_slices, segment_info_slices, kind, slice_entries, thread_id.
    let fields = [(216, SEGMENT ^ 0x5aa5), (224, 512), (232, 1), (240, 0), (248, 512), (256, 7)];
    let page = |slice: u64| 264 + slice * 80;
    let block = |slice: u64, bytes: u64, index: u64| SEGMENT + slice * 0x1_0000 + if bytes <= 1024 { 384 } else { 0 } + index * bytes;
    // slice_count, capacity and reserved, free, used and xblock_size, local_free, xthread_free, xheap.
    let small =
        [(0, 1), (8, 100 << 16 | 1000 << 32), (16, block(1, 64, 3)), (24, 98 | 64 << 32), (40, block(1, 64, 9) | 2), (48, SEGMENT_HEAP)];
    let large = [(0, 1), (8, 6 << 16 | 6 << 32), (16, 0), (24, 5 | 10_000 << 32), (32, block(2, 10_000, 1)), (48, SEGMENT_HEAP)];
    let all = fields.into_iter().chain([(page(0), 1), (page(3), 509)]);
    let all = all.chain(small.map(|(at, word)| (page(1) + at, word))).chain(large.map(|(at, word)| (page(2) + at, word)));
    for (at, word) in all {
        memory.write_word(SEGMENT + at, word);
    }
    // The second free block, and a block that another thread freed while its page was full.
    memory.write_word(block(1, 64, 3), block(1, 64, 5));
    for slice in 0..20 {
        memory.write_word(SEGMENT + 0x1_0000 + slice * 4096 + 8, 0);
    }
    memory.write_word(SEGMENT_HEAP + 2840, block(2, 10_000, 4));
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]]));
        let start = if place < 0x1000 { SEGMENT } else { SEGMENT + 0xf000 };
        memory.write(start + place, &pair[2..]);
    }
    let Some(taken) = at_every_level(&memory, "service") else { return };
    if bytes.is_empty() {
        let live: Vec<_> = taken.census.heaps.iter().map(|heap| (heap.ladder.live_bytes, heap.live_allocations)).collect();
        assert_eq!(live, [(Some(97 * 64 + 4 * 10_000), Some(101))]);
    }
}

/// An arena of mimalloc 3.4 with a page of 64-byte blocks and one of 10,000 bytes, a large block with a mapping of its own, the page map and
/// the library's data.
const LIBRARY_DATA: u64 = 0x7f40_0000_1000;
const SLICE_MAP: u64 = 0x7f41_0000_0000;
const MAP_PART: u64 = 0x7f42_0000_0000;
const THREE: u64 = 0x7f43_0000_0000;
const ALONE: u64 = 0x7f43_1000_0000;
const THREE_MAPS: &[u8] = b"7f4000000000-7f4000001000 r--p 00000000 08:01 5 /usr/lib/libmimalloc.so.3\n\
7f4000001000-7f4000003000 rw-p 00001000 08:01 5 /usr/lib/libmimalloc.so.3\n\
7f4100000000-7f4100210000 rw-p 00000000 00:00 0\n\
7f4200000000-7f4200010000 rw-p 00000000 00:00 0\n\
7f4300000000-7f4304000000 rw-p 00000000 00:00 0\n\
7f4310000000-7f4310300000 rw-p 00000000 00:00 0\n";

/// mimalloc's page map, arenas, pages and lists: pairs of a place and a word, of the arena's data first, then of the map, the large block
/// and the blocks.
pub fn mimalloc_arenas(bytes: &[u8]) {
    const SLICE: u64 = 0x1_0000;
    let mut memory = Fixture::with_maps(Maps::parse(THREE_MAPS));
    let subprocess = LIBRARY_DATA + 0x100;
    let part = MAP_PART + ((THREE >> 16) % 8192) * 8;
    let (entries, bitmap) = (THREE + 0x8000, THREE + 0x4000);
    let entry = |slice: u64| entries + slice * 112;
    let of_arena = |slice: u64, slices: u64| [(88, THREE), (96, slice | slices << 32), (104, 7)];
    // free, used and capacity and reserved, local_free, xthread_free, block_size, page_woffset.
    let block = |index: u64| THREE + 2 * SLICE + index * 64;
    let small = [(8, block(3)), (16, 98 | 100 << 16 | 1024 << 32), (32, block(9) | 1), (40, 64), (48, (THREE + 2 * SLICE - entry(2)) / 8)];
    let large = [(16, 5 | 6 << 16 | 52 << 32), (24, THREE + 3 * SLICE + 10_000), (40, 10_000), (48, (THREE + 3 * SLICE - entry(3)) / 8)];
    let alone = [(16, 1 | 1 << 16 | 1 << 32), (40, 0x2f_0000), (48, SLICE / 8), (88, ALONE), (96, 0x30_0000), (104, 4)];
    let words = [(LIBRARY_DATA, SLICE_MAP), (subprocess + 32, THREE), (SLICE_MAP, SLICE_MAP + (2 << 20))];
    let words = words.into_iter().chain([(SLICE_MAP + (THREE >> 29) * 8, MAP_PART), (part + 16, entry(2)), (part + 88 * 8, entry(3))]);
    let words = words.chain((3..11).map(|slice| (part + slice * 8, entry(3))));
    let words = words.chain((0..48).map(|slice| (part + (((ALONE - THREE) >> 16) + slice) * 8, ALONE)));
    // memid, subproc, arena_idx, slice_count, info_slices, slices_free, slices_committed.
    let arena = [(16, 4), (24, subprocess), (40, 1024), (48, 2), (104, bitmap), (112, bitmap + 192 + 128)];
    let words = words.chain(arena.map(|(at, word)| (THREE + at, word)));
    // Slice 11 has mimalloc's own data, and those behind it are free.
    let words = words.chain([(bitmap + 192, !0xfff)]).chain((1..16).map(|at| (bitmap + 192 + 8 * at, !0)));
    let words = words.chain(small.into_iter().chain(of_arena(2, 1)).map(|(at, word)| (entry(2) + at, word)));
    let words = words.chain(large.into_iter().chain(of_arena(3, 8)).map(|(at, word)| (entry(3) + at, word)));
    let words = words.chain(alone.map(|(at, word)| (ALONE + at, word))).chain([(block(3), block(5))]);
    words.for_each(|(at, word)| memory.write_word(at, word));
    for page in 0..80 {
        memory.write_word(THREE + 2 * SLICE + page * 4096 + 2048, 0);
    }
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]]));
        let start = [THREE, THREE + 0x4000, entries, SLICE_MAP + (THREE >> 29) * 8 - 0x800, part, ALONE, LIBRARY_DATA, THREE + 2 * SLICE]
            [(place >> 12) as usize % 8];
        memory.write(start + place % 0x1000, &pair[2..]);
    }
    let Some(taken) = at_every_level(&memory, "service") else { return };
    if bytes.is_empty() {
        let figures = |heap: &fragprof::census::HeapAccount| (heap.ladder.live_bytes, heap.live_allocations, heap.ladder.extent_bytes);
        let found: Vec<_> = taken.census.heaps.iter().map(figures).collect();
        assert_eq!(found, [(Some(97 * 64 + 5 * 10_000 + 0x2f_0000), Some(103), 1024 * SLICE + 0x30_0000)]);
    }
}

/// A heap of Google's tcmalloc with pages of 256 KiB in a program that has it linked in: a span of objects of 1 KiB, one of 64 KiB, a large
/// object and a sampled one; a slab of a CPU, a thread's cache and the transfer caches.
const SERVICE_DATA: u64 = 0x7f40_0000_1000;
const GOOGLE_HEAP: u64 = 0x1000_0000_0000;
const GOOGLE_OWN: u64 = 0x0c00_0000_0000;
const GOOGLE_MAPS: &[u8] = b"0c0000000000-0c0000100000 rw-p 00000000 00:00 0\n\
100000000000-100000400000 rw-p 00000000 00:00 0\n\
7f4000000000-7f4000001000 r--p 00000000 08:01 5 /usr/bin/service\n\
7f4000001000-7f4000081000 rw-p 00001000 08:01 5 /usr/bin/service\n";

/// The page map, spans, lists and caches of Google's tcmalloc: pairs of a place and a word, of each of its structures and of the objects.
pub fn google_tcmalloc(bytes: &[u8]) {
    const PAGE: u64 = 256 << 10;
    const CLASSES: u64 = 13;
    let mut memory = Fixture::with_maps(Maps::parse(GOOGLE_MAPS));
    let (root, table) = (SERVICE_DATA + 0x1_0000, SERVICE_DATA + 0x6_0100);
    let [leaf, spans, sample, slots, slab, thread] = [0, 0x8_0000, 0x9_0000, 0xa_0000, 0xc_0000, 0xd_0000].map(|at| GOOGLE_OWN + at);
    let object = |index: u64| GOOGLE_HEAP + index * 1024;
    // first_page, num_pages, the rest: indices or bitmap or sampled allocation.
    let span = |number: u64, page: u64, pages: u64, rest: u64| {
        [(24, (GOOGLE_HEAP / PAGE) + page), (32, pages), (40, rest)].map(|(at, word)| (spans + 64 * number + at, word))
    };
    let words = [(root + (GOOGLE_HEAP >> 33) * 8, leaf), (SERVICE_DATA + 0x200, slab | 12), (SERVICE_DATA + 0x208, thread)].into_iter();
    let words =
        words.chain([span(0, 0, 1, 128 << 16), span(1, 1, 2, 0b1100), span(2, 3, 4, 0), span(3, 7, 1, sample)].into_iter().flatten());
    // embed_count, freelist, allocated, cache_size: objects 0, 1, 5 and 7 are free, the last in the one before it.
    let words =
        words.chain([(spans + 16, 1 | 640 << 16 | 252 << 32 | 2 << 48), (spans + 64 + 16, 6 << 32), (object(5), 0xffff | 896 << 16)]);
    let of_page = [(0, 0, 1u64), (1, 1, 2), (2, 1, 2), (3, 2, 0), (7, 3, 0)];
    let words = words.chain(of_page.map(|(page, number, class)| (leaf + 0x8000 + 8 * page, (spans + 64 * number) | (class << 48))));
    let words = words.chain([(leaf, 1 | 2 << 8 | 2 << 16)]);
    // The sampler holds object 9.
    let words = words.chain([(sample + 32, object(9)), (sample + 40, 1000), (sample + 56, 1024)]);
    // slot_info, slots, size_class, object_size, objects_per_span, pages_per_span.
    let classes = (1..CLASSES).flat_map(|class| {
        let (bytes, pages) = match class {
            1 => (1024, 1),
            2 => (65_536, 2),
            _ => (4096 * class, 1),
        };
        let used = if class == 1 { 2 } else { 0 };
        let fields = [(-24, used | 8 << 32), (-16, slots + 0x100 * class), (0, class), (8, bytes), (16, pages * PAGE / bytes), (40, pages)];
        fields.map(|(at, word)| ((table + 512 * class).wrapping_add_signed(at), word))
    });
    let words = words.chain(classes).chain([(slots + 0x100, object(20)), (slots + 0x108, object(21))]);
    // Marks, two objects of the first class, one of the second.
    let slab_words = [(7, slab + 57), (8, object(30)), (9, object(31)), (12, slab + 97), (13, GOOGLE_HEAP + PAGE)];
    let words = words.chain(slab_words.map(|(place, word)| (slab + 8 * place, word)));
    let words = words.chain([(slab, (10 | 12 << 16) << 32), (slab + 8, 14 | 14 << 16)]);
    let words = words.chain((0..CLASSES).map(|class| (thread + 24 * class + 16, 1)));
    let words = words.chain([(thread + 24, object(40)), (thread + 32, 2), (object(40), object(41)), (object(41), 0)]);
    words.for_each(|(at, word)| memory.write_word(at, word));
    for page in 0..64 {
        memory.write_word(GOOGLE_HEAP + page * 0x8000 + 2056, 0);
    }
    for pair in bytes.chunks_exact(10).take(256) {
        let place = u64::from(u16::from_le_bytes([pair[0], pair[1]]));
        let start =
            [spans, sample, slots, slab, thread, leaf, leaf + 0x8000, table, table + 0x1000, GOOGLE_HEAP, root + (GOOGLE_HEAP >> 33) * 8]
                [(place >> 12) as usize % 11];
        memory.write(start + place % 0x1000, &pair[2..]);
    }
    let Some(taken) = at_every_level(&memory, "service") else { return };
    if bytes.is_empty() {
        let figures = |heap: &fragprof::census::HeapAccount| {
            (heap.allocator.name(), heap.ladder.live_bytes, heap.live_allocations, heap.details.cached_bytes, heap.ladder.extent_bytes)
        };
        let found: Vec<_> = taken.census.heaps.iter().map(figures).collect();
        let live = 245 * 1024 + 5 * 65_536 + 4 * PAGE + PAGE;
        assert_eq!(found, [("google_tcmalloc", Some(live), Some(252), Some(6 * 1024 + 65_536), 4 << 20)]);
    }
}

/// A trace, and the events inside its chunks, which a checksum would keep from a fuzzer: traces are files from anywhere.
pub fn trace(bytes: &[u8]) {
    if let Ok(mut reader) = fragprof::trace::Reader::new(bytes) {
        while let Ok(Some(_)) = reader.next_item() {}
    }
    if let Ok(survey) = fragprof::replay::Survey::of(bytes) {
        let _ = survey.check();
        let _ = fragprof::replay::Setting::today(&survey.header, survey.end.as_ref(), survey.header.cpus);
    }
    let (mut state, mut rest) = (State::at(0), Bytes(bytes));
    let mut last_ns = 0;
    while let Ok(Some(event)) = state.decode(&mut rest) {
        assert!(event.time_ns >= last_ns && event.thread < state.next_thread());
        last_ns = event.time_ns;
    }
}

/// A file of another tool that is converted into a trace: heaptrack's, and three kinds of glibc's.
pub fn foreign_trace(bytes: &[u8]) {
    let options = fragprof::trace::convert::Options { bytes_max: 1 << 20, allocator_of: |_| None };
    let mut trace = Vec::new();
    let Ok(converted) = fragprof::trace::convert::convert(bytes, &mut trace, &options) else { return };
    let mut reader = fragprof::trace::Reader::new(&trace[..]).expect("what was written is a trace");
    let mut events = 0;
    while let Some(item) = reader.next_item().expect("what was written is a trace") {
        events += u64::from(matches!(item, fragprof::trace::read::Item::Event(_)));
    }
    assert_eq!(events, converted.end.events);
}

/// Memory that recorded processes share with the recorder, as they may have written it: two entries, the states of four chunks, and the
/// beginnings of the chunks.
pub fn ring(bytes: &[u8]) {
    const CHUNKS: usize = 4;
    const ENTRY_BYTES: usize = size_of::<RingProcess>();
    let (head_bytes, chunk_bytes) = (RING_CHUNK_BYTES as usize, RING_CHUNK_BYTES as usize);
    let mut image = vec![0; head_bytes + CHUNKS * chunk_bytes];
    let mut rest = bytes;
    let mut put = |at: usize, most: usize| {
        let (part, after) = rest.split_at(most.min(rest.len()));
        image[at..at + part.len()].copy_from_slice(part);
        rest = after;
    };
    let entries = RING_HEADER_BYTES as usize;
    put(entries, 2 * ENTRY_BYTES);
    put(entries + RING_PROCESSES as usize * ENTRY_BYTES, CHUNKS * 4);
    let part = bytes.len().saturating_sub(2 * ENTRY_BYTES + CHUNKS * 4) / CHUNKS;
    for chunk in 0..CHUNKS {
        put(head_bytes + chunk * chunk_bytes, part.min(chunk_bytes));
    }
    let memory = Memory::of_bytes(&image);
    let (mut reader, mut tally) = (RingReader::new(&memory), RingTally::default());
    for _ in 0..3 {
        reader.pass(&memory, &mut tally, true);
        tally.announced.iter().for_each(|entry| reader.admit(*entry));
    }
    tally.announced.iter().for_each(|entry| reader.end(*entry));
    for _ in 0..8 {
        reader.pass(&memory, &mut tally, true);
    }
    assert!(tally.events <= 2 * CHUNKS * chunk_bytes / RING_CELL_BYTES as usize, "events are read twice");
}

#[derive(Default)]
struct RingTally {
    announced: Vec<usize>,
    events: usize,
}

impl Receiver for RingTally {
    fn announced(&mut self, announced: &Announced) {
        self.announced.push(announced.entry);
    }
    fn replaced(&mut self, _: usize, _: &Counts) {}
    fn event(&mut self, _: usize, event: &Event) {
        self.events += 1;
        assert!(event.addr.0 < 1 << RING_ADDRESS_BITS);
    }
    fn stack(&mut self, _: usize, _: u32, frames: &[u64], _: u8) {
        assert!(frames.iter().all(|frame| frame >> FRAME_KIND_BIT == 0));
    }
    fn thread_ended(&mut self, _: usize, _: u32) {}
    fn ended(&mut self, _: usize, _: &Counts) {}
    fn is_thread(&mut self, _: usize, tid: u32) -> bool {
        tid.is_multiple_of(2)
    }
}
