//! The tests' consumer of `otel_memory`, and its ledger.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use fragprof::bpf::FRAME_ADDRESS_MASK;
use fragprof::capture::Tables;
use fragprof::units::Pid;
use libbpf_rs::{Link, MapCore as _, MapFlags, Object, ObjectBuilder, RingBuffer, RingBufferBuilder};
use object::{Object as _, ObjectSymbol as _};
use tempfile::TempDir;

use crate::support::LIMIT;
use crate::support::process::{Process, run};

/// `TEST_FRAMES_MAX` of usdt_test.bpf.c.
const FRAMES_MAX: usize = 24;

/// One hit of a probe.
#[derive(Debug, Clone)]
pub struct Record {
    /// Process.
    pub pid: u32,
    /// Whether it is `otel_memory:free`, otherwise `alloc`.
    pub is_free: bool,
    /// First argument.
    pub pointer: u64,
    /// Second.
    pub size_bytes: u64,
    /// Third.
    pub weight_bytes: u64,
    /// Fourth.
    pub interval_bytes: u64,
    /// Addresses, leaf first.
    pub frames: Vec<u64>,
}

/// The test programs loaded, and their samples so far.
pub struct Consumer {
    // Before the object: it refers to its maps.
    ring: RingBuffer<'static>,
    links: Vec<Link>,
    object: Object,
    tables: Option<Tables>,
    records: Rc<RefCell<Vec<Record>>>,
    lost_offset: usize,
}

impl Consumer {
    /// Compiles and loads `usdt_test.bpf.c`.
    pub fn new() -> Self {
        let object = ObjectBuilder::default().open_file(object_file()).unwrap().load().unwrap();
        let records = Rc::new(RefCell::new(Vec::new()));
        let sink = Rc::clone(&records);
        let mut builder = RingBufferBuilder::new();
        let map = object.maps().find(|map| map.name() == "records").unwrap();
        builder
            .add(&map, move |bytes| {
                sink.borrow_mut().push(parse(bytes));
                0
            })
            .unwrap();
        let ring = builder.build().unwrap();
        Self { ring, links: Vec::new(), object, tables: None, records, lost_offset: lost_offset() }
    }

    /// Attaches to both probes of a library, for one process or, with -1, for all. The probe `free` comes first, so that every reported
    /// block has its free reported.
    pub fn attach(&mut self, pid: i32, library: &Path) {
        self.attach_to(pid, library, "free");
        self.attach_to(pid, library, "alloc");
    }

    /// Attaches to one probe.
    pub fn attach_to(&mut self, pid: i32, library: &Path, probe: &str) {
        let program = self.object.progs_mut().find(|program| program.name() == format!("on_{probe}").as_str()).unwrap();
        self.links.push(program.attach_usdt(pid, library, "otel_memory", probe).unwrap());
    }

    /// Detaches all probes, in reverse order.
    pub fn detach(&mut self) {
        while self.links.pop().is_some() {}
    }

    /// Runs a program that begins when it is told to, and prints a line of numbers when it has its final heap: the numbers, and the ledger
    /// then. It may still start while the probes are attached: a sample of then is freed without having been reported.
    pub fn numbers_and_ledger(&mut self, library: &Path, command: &mut Command) -> (Vec<f64>, Ledger) {
        let mut process = Process::start_piped(command);
        let mut input = process.input();
        self.attach(process.pid() as i32, library);
        input.write_all(b"g").unwrap();
        let mut ledger = Ledger::default();
        let line = loop {
            // Records are read meanwhile, otherwise the ring would overflow.
            ledger.add(&self.records());
            if let Some(line) = process.out.wait_for(Duration::from_millis(20), |_| true) {
                break line;
            }
            assert!(process.is_running(), "{}", process.err.all());
        };
        ledger.add(&self.records());
        self.detach();
        drop(input);
        assert!(process.wait(LIMIT).success(), "{}", process.err.all());
        assert_eq!(ledger.collisions, 0);
        (line.split_whitespace().map(|word| word.parse().unwrap()).collect(), ledger)
    }

    /// Loads the process's unwind tables into the kernel: its records have stacks from now on.
    pub fn watch_stacks(&mut self, pid: u32) {
        let object = &self.object;
        let tables = self.tables.get_or_insert_with(|| Tables::new(object, 64 << 20).unwrap());
        let process = fragprof::process::Process::open(Pid(pid)).unwrap();
        tables.sync_process(&process, pid, &process.maps().unwrap()).unwrap();
        assert!(tables.wait_until_loaded(Duration::from_secs(60)));
    }

    /// Everything received since the last call. Fails the test if anything was lost.
    pub fn records(&mut self) -> Vec<Record> {
        self.ring.consume().unwrap();
        assert_eq!(self.lost(), 0, "records were lost: the test reads too rarely");
        std::mem::take(&mut *self.records.borrow_mut())
    }

    /// The counter `lost` of usdt_test.bpf.c.
    fn lost(&self) -> u64 {
        let map = self.object.maps().find(|map| map.name().to_string_lossy().ends_with(".bss")).unwrap();
        let bytes = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
        let at = self.lost_offset;
        u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap())
    }
}

/// Offset of `lost` in .bss, from the object's symbol table.
fn lost_offset() -> usize {
    let bytes = fs::read(object_file()).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    file.symbols().find(|symbol| symbol.name() == Ok("lost")).unwrap().address() as usize
}

/// Compiles the BPF object once per test run.
fn object_file() -> PathBuf {
    static ONCE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    ONCE.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = TempDir::new().unwrap();
        let headers = directory.path().join("bpf");
        fs::create_dir(&headers).unwrap();
        for (name, text) in libbpf_sys::API_HEADERS {
            fs::write(headers.join(name), text).unwrap();
        }
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("usdt_test.{}.bpf.o", std::process::id()));
        let mut clang = Command::new("clang");
        clang
            .args([
                "-target",
                "bpf",
                "-mcpu=v3",
                "-g",
                "-O2",
                "-D__TARGET_ARCH_x86",
                "-Wall",
                "-Werror",
                "-Wno-gnu-variable-sized-type-not-at-end",
            ])
            .arg("-I")
            .arg(directory.path())
            .arg(format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH))
            .arg("-c")
            .arg(root.join("tests/sampler/usdt_test.bpf.c"))
            .arg("-o")
            .arg(&out);
        let done = run(&mut clang);
        assert!(done.status.success(), "{}", done.err);
        out
    })
    .clone()
}

fn parse(bytes: &[u8]) -> Record {
    let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
    let half = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    let frames = (0..(half(40) as usize).min(FRAMES_MAX)).map(|i| word(48 + 8 * i) & FRAME_ADDRESS_MASK).collect();
    let is_free = half(4) != 0;
    Record { pid: half(0), is_free, pointer: word(8), size_bytes: word(16), weight_bytes: word(24), interval_bytes: word(32), frames }
}

/// A live sampled block.
#[derive(Debug, Clone)]
pub struct Block {
    /// As received.
    pub size_bytes: u64,
    /// As received.
    pub weight_bytes: u64,
    /// As received.
    pub interval_bytes: u64,
    /// As received.
    pub frames: Vec<u64>,
}

/// A consumer's state after some records: the naive model.
#[derive(Debug, Default)]
pub struct Ledger {
    /// By address.
    pub live: HashMap<u64, Block>,
    /// All blocks reported so far.
    pub made: Vec<Block>,
    /// Frees of reported blocks.
    pub frees: u64,
    /// Frees of blocks that were never reported, or twice.
    pub unknown_frees: u64,
    /// Blocks reported at the address of a live one.
    pub collisions: u64,
}

impl Ledger {
    /// Adds the records of one process.
    pub fn add(&mut self, records: &[Record]) {
        for record in records {
            if record.is_free {
                match self.live.remove(&record.pointer) {
                    Some(_) => self.frees += 1,
                    None => self.unknown_frees += 1,
                }
                continue;
            }
            let block = Block {
                size_bytes: record.size_bytes,
                weight_bytes: record.weight_bytes,
                interval_bytes: record.interval_bytes,
                frames: record.frames.clone(),
            };
            self.made.push(block.clone());
            self.collisions += u64::from(self.live.insert(record.pointer, block).is_some());
        }
    }

    /// Sum of the weights of the live blocks.
    pub fn live_weight_bytes(&self) -> u64 {
        self.live.values().map(|block| block.weight_bytes).sum()
    }
}
