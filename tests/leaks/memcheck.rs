//! Blocks without pointers, compared with what memcheck calls lost in a run of its own: its allocator puts blocks at other addresses.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use fragprof::capture::registers::ThreadRegisters;
use fragprof::census::{LayoutCache, LiveMemory};
use fragprof::process::Process;
use fragprof::retention::scans::{Plan, scan};
use fragprof::units::Pid;

use super::real::Running;
use super::target::{Target, build};

/// One of memcheck's records: blocks that are lost, definitely or with a block that is.
struct Lost {
    blocks: u64,
    bytes: u64,
    /// Lines of the frames, innermost first; 0 = not known.
    lines: Vec<usize>,
}

/// The text of each element with this name.
fn elements<'a>(xml: &'a str, name: &str) -> Vec<&'a str> {
    let (open, close) = (format!("<{name}>"), format!("</{name}>"));
    xml.split(&open).skip(1).filter_map(|rest| rest.split(&close).next()).collect()
}

/// Runs a program under memcheck to its end.
fn lost_by_memcheck(command: &Command) -> Vec<Lost> {
    let directory = tempfile::tempdir().unwrap();
    let report = directory.path().join("report.xml");
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--leak-check=full", "--leak-resolution=high", "--show-leak-kinds=all", "--num-callers=40", "--xml=yes"]);
    valgrind.arg(format!("--xml-file={}", report.display())).arg(command.get_program()).args(command.get_args());
    valgrind.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let done = valgrind.stdin(Stdio::null()).output().expect("valgrind is missing: install valgrind");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let xml = std::fs::read_to_string(report).unwrap();
    let number = |text: Option<&&str>| text.and_then(|text| text.parse::<u64>().ok());
    let lost = |error: &&str| matches!(elements(error, "kind").first(), Some(&("Leak_DefinitelyLost" | "Leak_IndirectlyLost")));
    let records = elements(&xml, "error").into_iter().filter(lost).filter_map(|error| {
        let frames = elements(error, "frame").into_iter();
        let lines = frames.map(|frame| number(elements(frame, "line").first()).unwrap_or(0) as usize).collect();
        let blocks = number(elements(error, "leakedblocks").first())?;
        // Of a block with others behind it, only its own bytes: "64 (32 direct, 32 indirect) bytes in 1 blocks are definitely lost".
        let text = elements(error, "text").first().copied().unwrap_or_default().replace(',', "");
        let direct = text.split_once(" direct ").and_then(|(before, _)| before.split('(').nth(1)?.parse().ok());
        let bytes = direct.or_else(|| number(elements(error, "leakedbytes").first()))?;
        Some(Lost { blocks, bytes, lines })
    });
    records.collect()
}

/// Each kind of block of the truth program is made in a line of its own.
#[test]
fn memcheck_loses_the_same_blocks_of_each_kind() {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/leaks/truth.c")).unwrap();
    let kind_at = |line: usize| {
        let text = source.lines().nth(line.checked_sub(1)?)?;
        text.contains("made(").then(|| text.split('"').nth(1))?
    };
    let program = build("cc", "truth.c", &[], "glibc");
    let mut command = Command::new(&program);
    command.arg("/dev/null");
    let mut theirs: BTreeMap<&str, u64> = BTreeMap::new();
    for record in lost_by_memcheck(&command) {
        if let Some(kind) = record.lines.iter().find_map(|&line| kind_at(line)) {
            *theirs.entry(kind).or_default() += record.blocks;
        }
    }
    println!("memcheck: {theirs:?}");
    let target = Target::start(Command::new(&program), None);
    let judged = target.judge(&target.scan(1, Duration::from_millis(500)));
    println!("here: {:?}", judged.0);
    // Blocks to which only freed memory points depend on which memory is allocated again.
    for (kind, (found, all)) in judged.0.iter().filter(|(kind, _)| !matches!(kind.as_str(), "stale" | "not known")) {
        let lost = theirs.get(kind.as_str()).copied().unwrap_or(0);
        assert!(lost.abs_diff(*found) * 100 <= *all, "{kind}: {found} here, {lost} of {all} there");
    }
    // An old word of a stack or a register may point to one.
    let leaked = theirs.iter().filter(|(kind, _)| kind.starts_with("leak-")).map(|(_, blocks)| blocks).sum::<u64>();
    assert!((9_990..=10_000).contains(&leaked), "{theirs:?}");
}

/// Usable bytes of glibc's block for a request (malloc.c, `request2size`).
fn usable_bytes(requested: u64) -> u64 {
    ((requested + 8).div_ceil(16) * 16).max(32) - 8
}

/// An interpreter that loses memory of a C library. It ends without destructors, so that both see the same heap. memcheck hands out no freed
/// memory again, so there are no old pointers in it; here some blocks are hidden by them. What is reported must be lost there too.
#[test]
fn memcheck_loses_the_same_blocks_of_a_python_program() {
    const PROGRAM: &str = "
import ctypes, json, os, sys
libc = ctypes.CDLL(None)
for function in (libc.strdup, libc.calloc, libc.malloc, libc.realloc):
    function.restype = ctypes.c_void_p
kept = (ctypes.c_void_p * 300)(*[libc.strdup(b'k' * 777) for i in range(300)])
json.loads(json.dumps({str(i): [i] * 5 for i in range(3000)}))
for i in range(2000):
    libc.malloc(3000)
    libc.realloc(None, 4000)
for i in range(10):
    chain = None
    for i in range(10):
        block = libc.calloc(1, 6000)
        ctypes.c_void_p.from_address(block).value = chain
        chain = block
chain = block = None
libc.memset(ctypes.create_string_buffer(1 << 16), 0, 1 << 16)
json.loads(json.dumps({str(i): [i] * 5 for i in range(9000)}))
print('ready', flush=True)
sys.stdin.read()
os._exit(0)
";
    // memcheck does not follow a wrapper's exec.
    let python = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    let mut command = Command::new(String::from_utf8_lossy(&python.stdout).trim());
    command.args(["-c", PROGRAM]).env("PYTHONMALLOC", "malloc");
    let mut theirs: BTreeMap<u64, u64> = BTreeMap::new();
    for record in lost_by_memcheck(&command) {
        *theirs.entry(usable_bytes(record.bytes / record.blocks.max(1))).or_default() += record.blocks;
    }
    let mut child = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.0.stdout.take().unwrap()), &mut line).unwrap();
    let pid = child.0.id();
    let memory = LiveMemory::open(Process::open(Pid(pid)).unwrap()).unwrap();
    let registers = ThreadRegisters::of(Pid(pid)).unwrap();
    let seen = scan(&memory, (pid, "python3"), Plan::default(), Some(&|| registers.read()), &mut LayoutCache::default()).unwrap();
    let mut ours: BTreeMap<u64, u64> = BTreeMap::new();
    for (_, block) in seen.candidates.left() {
        *ours.entry(block.range().end - block.range().start).or_default() += 1;
    }
    println!("memcheck: {theirs:?}\nhere: {ours:?}");
    for (requested, lost) in [(3000, 2000), (4000, 2000), (6000, 100)] {
        let of = |blocks: &BTreeMap<u64, u64>| blocks.get(&usable_bytes(requested)).copied().unwrap_or(0);
        let (here, there) = (of(&ours), of(&theirs));
        // The interpreter's registers and stack may still point to the last few, in either run to others. An old pointer to the first block
        // of a chain hides ten, here or there.
        let (least_there, least) = if lost == 100 { (lost / 2, 0) } else { (lost * 98 / 100, there * 9 / 10) };
        assert!((least_there..=lost).contains(&there), "{there} of {lost} blocks of {requested} bytes by memcheck");
        assert!((least..=lost).contains(&here), "{here} of {lost} blocks of {requested} bytes, {there} by memcheck");
    }
    let elsewhere: Vec<_> = ours.iter().filter(|(bytes, _)| ![3000, 4000, 6000].map(usable_bytes).contains(bytes)).collect();
    assert!(elsewhere.iter().all(|(bytes, blocks)| theirs.get(*bytes).is_some_and(|lost| lost >= *blocks)), "{elsewhere:?}");
}
