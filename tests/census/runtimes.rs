//! Memory that runtimes manage outside malloc, against their own accounts.

use std::path::Path;
use std::process::Command;

use fragprof::census::runtime::RuntimeMemory;
use fragprof::census::runtime::hotspot::JavaMemory;
use fragprof::census::{Level, Taken};
use serde_json::Value;

use super::target::{Target, build};

/// Starts a program that prints its own account in a line of JSON, then waits for its input to end.
fn started(command: &mut Command) -> (Target, Value) {
    let mut target = Target::start(command);
    let own = target.hear();
    (target, own)
}

fn number(account: &Value, key: &str) -> u64 {
    account[key].as_u64().unwrap_or_else(|| panic!("{key} in {account}"))
}

fn memory<'a>(taken: &'a Taken, kind: &str) -> &'a RuntimeMemory {
    let found = taken.census.runtimes.memory.iter().find(|one| one.kind == kind);
    found.unwrap_or_else(|| panic!("no {kind}: {:?}, {:?}", taken.census.runtimes, taken.census.layout_unknown))
}

fn resident(taken: &Taken, kind: &str) -> u64 {
    taken.census.not_malloc.iter().filter(|one| one.kind == kind).map(|one| one.resident_bytes).sum()
}

/// The heap was read, only by the C library's reader, and is usable for verdicts.
fn assert_glibc_alone(taken: &Taken) {
    let allocators: Vec<&str> = taken.census.heaps.iter().map(|heap| heap.allocator.name()).collect();
    assert_eq!(allocators, ["glibc"], "{:?}", taken.census.heaps);
    assert!(taken.census.walk.usable && taken.census.layout_unknown.is_empty(), "{:?}", taken.census.layout_unknown);
}

#[test]
fn gos_heap_is_what_the_runtime_got_from_the_system() {
    const PROGRAM: &str = r#"package main
import ("bufio"; "fmt"; "os"; "runtime")
var keep [][]byte
func main() {
    for i := 0; i < 40000; i++ { keep = append(keep, make([]byte, 1000+i%500)) }
    runtime.GC()
    var m runtime.MemStats
    runtime.ReadMemStats(&m)
    fmt.Printf("{\"heap\":%d,\"stacks\":%d,\"gc\":%d,\"idle\":%d}\n", m.HeapSys, m.StackSys, m.GCSys, m.HeapReleased)
    bufio.NewReader(os.Stdin).ReadString('\n')
    fmt.Println(len(keep))
}
"#;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("main.go"), PROGRAM).unwrap();
    let mut go = Command::new("go");
    go.args(["build", "-o", "held", "main.go"]).current_dir(directory.path()).env("GO111MODULE", "off");
    let made = go.output().expect("go is missing: install golang-go");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let (target, own) = started(&mut Command::new(directory.path().join("held")));
    let taken = target.census(Level::Full);
    let heap = memory(&taken, "go_heap");
    // The collector's work buffers lie in spans of the heap, but the runtime counts them in GCSys, together with what lies outside.
    let least = number(&own, "heap") + number(&own, "stacks");
    assert!((least..=least + number(&own, "gc")).contains(&heap.extent_bytes), "{heap:?}: {own}");
    assert!(heap.resident_bytes + heap.swapped_bytes <= heap.extent_bytes - number(&own, "idle") + (1 << 20));
    assert_eq!(resident(&taken, "other_anonymous"), 0, "{:?}", taken.census.not_malloc);
}

fn jvm(options: &[&str]) -> (Target, Value, Taken) {
    let directory = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/census/Native.java");
    let made = Command::new("javac").arg("-d").arg(directory.path()).arg(source).output().expect("install default-jdk-headless");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let library = build("native.c", "cc", &["-shared", "-fPIC"]);
    let mut java = Command::new("java");
    let (target, own) = started(java.args(options).arg("-cp").arg(directory.path()).arg("Native").arg(&library));
    let taken = target.census(Level::Full);
    (target, own, taken)
}

fn java(taken: &Taken) -> &JavaMemory {
    taken.census.runtimes.java.as_ref().unwrap_or_else(|| panic!("no java: {:?}", taken.census.runtimes))
}

/// The output of `jcmd PID COMMAND`.
fn jcmd(target: &Target, command: &str) -> String {
    let output = Command::new("jcmd").args([&target.pid().to_string(), command]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The number before `K` or `KB` after a word.
fn kilobytes(text: &str, word: &str) -> u64 {
    let rest = &text[text.find(word).unwrap_or_else(|| panic!("{word} in {text}")) + word.len()..];
    let digits: String = rest.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("{word} in {text}"))
}

#[test]
fn a_jvms_heap_and_its_limit_are_those_that_the_jvm_reports() {
    for (options, collector, set_by) in [
        (&["-XX:+UseSerialGC", "-Xmx96m", "-Xms32m"][..], "serial", "command_line"),
        (&["-XX:+UseG1GC", "-Xms32m", "-XX:MaxRAMPercentage=2"], "g1", "max_ram_percentage"),
        (&["-XX:+UseParallelGC", "-Xms32m"], "parallel", "default"),
    ] {
        let (target, _, taken) = jvm(&[options, &["-XX:NativeMemoryTracking=summary"]].concat());
        let own = java(&taken);
        assert_eq!((own.collector, own.heap.max_set_by), (Some(collector), Some(set_by)));
        let flags = jcmd(&target, "VM.flags");
        let max: u64 = flags.split("-XX:MaxHeapSize=").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
        assert_eq!(own.heap.max_bytes, Some(max), "{options:?}");
        let native = jcmd(&target, "VM.native_memory summary");
        let heap = native.split("Java Heap").nth(1).unwrap();
        assert_eq!(own.heap.reserved_bytes, Some(kilobytes(heap, "reserved=") << 10), "{options:?}");
        assert_eq!(own.heap.committed_bytes, Some(kilobytes(heap, "committed=") << 10), "{options:?}");
        assert!(own.heap.used_bytes.is_none_or(|used| used <= own.heap.committed_bytes.unwrap()));
        // The archive of classes' part of the Java heap is included, too.
        let counted = resident(&taken, "java_heap");
        assert!(counted.abs_diff(own.heap.resident_bytes.unwrap()) <= 1 << 20, "{counted}: {own:?}");
        // The command loads classes itself, and the counters are those of the last collection.
        let class_space = kilobytes(native.split("Class space:").nth(1).unwrap(), "committed=") << 10;
        assert!(resident(&taken, "java_classes") <= class_space, "{:?}", taken.census.not_malloc);
        if let Some(metaspace) = own.metaspace {
            assert!(metaspace.used_bytes <= metaspace.committed_bytes && metaspace.committed_bytes <= metaspace.reserved_bytes);
            assert!(metaspace.class_space_committed_bytes <= class_space);
        }
    }
}

#[test]
fn phps_memory_is_what_php_got_from_the_system_and_nothing_else_is_taken_for_a_heap() {
    const SCRIPT: &str = r#"$keep = []; for ($i = 0; $i < 100000; $i++) $keep[] = "x".$i; $large = str_repeat("a", 7 << 20);
echo '{"used":', memory_get_usage(), ',"real":', memory_get_usage(true), "}\n"; fgets(STDIN);"#;
    let (target, own) = started(Command::new("php").args(["-n", "-r", SCRIPT]));
    let taken = target.census(Level::Full);
    assert_glibc_alone(&taken);
    let zend = memory(&taken, "zend_memory");
    assert_eq!(zend.extent_bytes, number(&own, "real"));
    // Printing the line took some.
    assert!(zend.used_bytes.unwrap().abs_diff(number(&own, "used")) < 64 << 10, "{zend:?}: {own}");
}

#[test]
fn rubys_pages_are_those_that_ruby_counts() {
    const SCRIPT: &str = r#"keep = (0...200000).map { |i| "x#{i}" * 3 }
GC.start; GC.disable
puts "{\"pages\":#{GC.stat(:heap_allocated_pages)},\"bytes\":#{GC::INTERNAL_CONSTANTS[:HEAP_PAGE_SIZE]}}"; STDOUT.flush; STDIN.read; keep.size"#;
    let (target, own) = started(Command::new("ruby").args(["--disable-gems", "-e", SCRIPT]));
    let taken = target.census(Level::Full);
    assert_glibc_alone(&taken);
    let ruby = memory(&taken, "ruby_heap");
    assert!(ruby.pieces.abs_diff(number(&own, "pages")) <= 1, "{ruby:?}: {own}");
    assert_eq!(ruby.extent_bytes, ruby.pieces * number(&own, "bytes"));
}

#[test]
fn nodes_pages_are_what_v8_got_from_the_system() {
    const SCRIPT: &str = r#"const keep = []; for (let i = 0; i < 300000; i++) keep.push({ a: i, b: "x" + i });
const large = [...Array(5)].map((_, i) => new Array(200000).fill(i));
gc(); setTimeout(() => console.log(JSON.stringify(require("v8").getHeapStatistics())), 100); process.stdin.resume(); globalThis.held = [keep, large];"#;
    let (target, own) = started(Command::new("node").args(["--expose-gc", "-e", SCRIPT]));
    let taken = target.census(Level::Full);
    assert!(taken.census.walk.usable, "{:?}", taken.census.walk);
    let v8 = memory(&taken, "v8_heap");
    // Pages of code may be executed and count as code_cache; a few are kept for reuse.
    let total = number(&own, "total_heap_size");
    assert!(v8.extent_bytes.abs_diff(total) < total / 20 + number(&own, "total_heap_size_executable") + (1 << 20), "{v8:?}: {own}");
}
