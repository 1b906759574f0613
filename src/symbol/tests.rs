//! Names compared with binutils: `addr2line` for DWARF, `nm` for symbol tables.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use super::*;
use crate::bpf::{FRAME_EXACT, FRAME_GUESSED, FRAME_JIT};
use crate::profile::Frame;

const CPP: &str = r#"
#include <cstdlib>
#include <vector>
namespace shop {
struct Session { int id; char *data; };
inline __attribute__((always_inline)) char *make(unsigned long n) {
    return static_cast<char *>(malloc(n));
}
__attribute__((noinline)) Session *create(int id) {
    Session *s = reinterpret_cast<Session *>(make(sizeof(Session)));
    s->id = id;
    s->data = make(100);
    return s;
}
class Cache {
  public:
    __attribute__((noinline)) int insert(std::vector<int> const &keys);
};
int Cache::insert(std::vector<int> const &keys) {
    int sum = 0;
    for (int k : keys) sum += k;
    return sum;
}
}
int main(int argc, char **argv) {
    std::vector<int> keys{1, 2, argc};
    return shop::create(argc)->id + shop::Cache().insert(keys);
}
"#;

const RUST: &str = r#"
mod shop {
    pub struct Cart { pub items: Vec<u64> }
    #[inline(always)]
    fn doubled(n: u64) -> u64 { n.wrapping_mul(2) }
    impl Cart {
        #[inline(never)]
        pub fn fill(&mut self, n: u64) { for i in 0..n { self.items.push(doubled(i)); } }
    }
}
fn main() {
    let mut cart = shop::Cart { items: Vec::new() };
    cart.fill(std::env::args().count() as u64);
    println!("{}", cart.items.len());
}
"#;

fn build(dir: &Path, name: &str, source: &str, compiler: &[&str]) -> PathBuf {
    let (input, output) = (dir.join(format!("{name}.src")), dir.join(name));
    std::fs::write(&input, source).unwrap();
    let run = Command::new(compiler[0]).args(&compiler[1..]).arg("-o").arg(&output).arg(&input).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    output
}

fn cpp_program(dir: &Path) -> PathBuf {
    build(dir, "cpp", CPP, &["g++", "-O2", "-g", "-x", "c++"])
}

fn lines(command: &mut Command) -> Vec<String> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

fn module(path: &Path) -> Module {
    Module { path: path.to_string_lossy().into_owned(), open_path: path.to_path_buf(), file: None, build_id: vec![0xab, 0xcd] }
}

/// A process that maps the whole file at `BASE`, as a loader maps a file whose segments' offsets and addresses differ.
fn mapped(module: Module) -> AddressSpace {
    let region = Region { start: BASE, end: BASE + (1 << 30), offset: 0, backing: Backing::File(Arc::new(module)) };
    AddressSpace::new(7, vec![region])
}

const BASE: u64 = 0x7f00_0000_0000;

/// (file offset − address) of the executable segment, by readelf.
fn text_bias(path: &Path) -> u64 {
    let segments = lines(Command::new("readelf").arg("-lW").arg(path));
    let text: Vec<&str> =
        segments.iter().find(|l| l.contains("LOAD") && l.contains(" E ")).map(|l| l.split_whitespace().collect()).unwrap();
    let number = |s: &str| u64::from_str_radix(s.trim_start_matches("0x"), 16).unwrap();
    number(text[1]).wrapping_sub(number(text[2]))
}

/// Function symbols as (address, size, demangled name), by nm.
fn functions(path: &Path, dynamic: bool) -> Vec<(u64, u64, String)> {
    let mut nm = Command::new("nm");
    nm.args(["-S", "-C", "--defined-only"]).arg(if dynamic { "-D" } else { "-a" }).arg(path);
    let parse = |line: &String| {
        let mut parts = line.splitn(4, ' ');
        let address = u64::from_str_radix(parts.next()?, 16).ok()?;
        let size = u64::from_str_radix(parts.next()?, 16).ok()?;
        matches!(parts.next()?, "t" | "T").then(|| Some((address, size, parts.next()?.to_owned())))?
    };
    lines(&mut nm).iter().filter_map(parse).collect()
}

fn squeezed(name: &str) -> String {
    name.chars().filter(|c| !c.is_whitespace()).collect()
}

/// Without what the manglings of Rust's compilers write differently: `<shop::Cart>::fill` is also `shop::Cart::fill`.
fn bare(name: &str) -> String {
    squeezed(name).replace(['<', '>'], "")
}

/// A frame in addr2line's terms.
fn said(frame: &Frame) -> (String, String, u32) {
    (squeezed(&frame.function), frame.file.rsplit('/').next().unwrap_or_default().to_owned(), frame.line)
}

/// The frames at an address by addr2line: innermost first.
fn by_addr2line(path: &Path, address: u64) -> Vec<(String, String, u32)> {
    let output = lines(Command::new("addr2line").args(["-f", "-i", "-C", "-e"]).arg(path).arg(format!("{address:#x}")));
    let said = |pair: &[String]| {
        let (file, line) = pair[1].rsplit_once(':').unwrap();
        let line = line.split(' ').next().unwrap().parse().unwrap_or(0);
        (squeezed(&pair[0]), file.rsplit('/').next().unwrap().to_owned(), line)
    };
    output.chunks(2).map(said).collect()
}

fn agrees_with_addr2line(path: &Path, wanted: &[&str]) -> usize {
    let bias = text_bias(path);
    let space = mapped(module(path));
    let mut symbolizer = Symbolizer::new();
    let mut inlined = 0;
    for name in wanted {
        let all = functions(path, false);
        let (start, size, _) = all.iter().find(|(_, _, f)| bare(f).contains(&bare(name))).unwrap_or_else(|| panic!("no {name}"));
        for address in *start..start + size {
            let exact = (BASE + address.wrapping_add(bias)) | FRAME_EXACT;
            let frames = symbolizer.stack(&space, &[exact]);
            let ours: Vec<_> = frames.iter().map(said).collect();
            assert_eq!(ours, by_addr2line(path, address), "{name} at {address:#x}");
            assert!(frames.iter().all(|f| f.address == address && &*f.build_id == "abcd"));
            let (last, others) = frames.split_last().unwrap();
            assert!(!last.flags.inlined && others.iter().all(|f| f.flags.inlined));
            inlined += others.len();
            // A return address is looked up one byte before itself.
            let returned = symbolizer.stack(&space, &[BASE + address.wrapping_add(bias) + 1]);
            assert_eq!(returned, frames);
        }
    }
    inlined
}

#[test]
fn a_cpp_programs_functions_lines_and_inlined_calls_equal_addr2lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let inlined = agrees_with_addr2line(&path, &["shop::create(int)", "shop::Cache::insert("]);
    assert!(inlined > 5, "make is inlined into create");
}

#[test]
fn a_rust_programs_functions_lines_and_inlined_calls_equal_addr2lines() {
    let dir = tempfile::tempdir().unwrap();
    let path = build(dir.path(), "rust", RUST, &["rustc", "-O", "-g", "--crate-name", "rusty"]);
    let inlined = agrees_with_addr2line(&path, &["shop::Cart::fill"]);
    assert!(inlined > 5, "doubled and Vec::push are inlined into fill");
}

#[test]
fn a_library_without_debug_information_gives_its_dynamic_symbols() {
    let libc = ["/lib/x86_64-linux-gnu/libc.so.6", "/usr/lib64/libc.so.6"].iter().map(Path::new).find(|p| p.exists()).unwrap();
    let space = mapped(module(libc));
    let bias = text_bias(libc);
    let mut symbolizer = Symbolizer::new();
    let mut tried = 0;
    for wanted in ["malloc", "qsort", "getaddrinfo"] {
        let all = functions(libc, true);
        let (start, size, _) = all.iter().find(|(_, _, name)| name.split('@').next() == Some(wanted)).unwrap();
        let frames = symbolizer.stack(&space, &[(BASE + start.wrapping_add(bias) + size / 2) | FRAME_EXACT]);
        // An alias at the same address is as good.
        let same: Vec<&str> = all.iter().filter(|(a, ..)| a == start).map(|(.., name)| name.split('@').next().unwrap()).collect();
        assert!(
            same.contains(&&*frames[0].function) || frames[0].function.contains(wanted),
            "{wanted}: {} not in {same:?}",
            frames[0].function
        );
        tried += 1;
    }
    assert_eq!(tried, 3);
}

#[test]
fn debug_information_in_a_separate_file_is_found_by_its_link() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let debug = dir.path().join("cpp.debug");
    let (start, size, _) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    let expected = by_addr2line(&path, start + size / 2);
    lines(Command::new("objcopy").arg("--only-keep-debug").arg(&path).arg(&debug));
    lines(Command::new("objcopy").arg("--strip-all").arg(format!("--add-gnu-debuglink={}", debug.display())).arg(&path));
    let space = mapped(module(&path));
    let frames = Symbolizer::new().stack(&space, &[(BASE + (start + size / 2).wrapping_add(text_bias(&path))) | FRAME_EXACT]);
    assert_eq!(frames.iter().map(said).collect::<Vec<_>>(), expected);
}

#[test]
fn a_pipe_instead_of_a_debug_file_does_not_block_the_symbolizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let debug = dir.path().join("cpp.debug");
    let (start, ..) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    let word = (BASE + start.wrapping_add(text_bias(&path))) | FRAME_EXACT;
    lines(Command::new("objcopy").arg("--only-keep-debug").arg(&path).arg(&debug));
    lines(Command::new("objcopy").arg("--strip-debug").arg(format!("--add-gnu-debuglink={}", debug.display())).arg(&path));
    std::fs::remove_file(&debug).unwrap();
    for pipe in [debug, dir.path().join("cpp.dwp")] {
        lines(Command::new("mkfifo").arg(&pipe));
        // It ends, although opening the pipe would wait for a writer. The symbol table still has the name.
        let frames = Symbolizer::new().stack(&mapped(module(&path)), &[word]);
        assert_eq!((&*frames[0].function, frames[0].line), ("shop::create(int)", 0));
        std::fs::remove_file(&pipe).unwrap();
    }
}

#[test]
fn a_file_that_was_deleted_and_replaced_is_read_through_its_open_descriptor() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let (start, size, _) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    let (expected, bias) = (by_addr2line(&path, start + size / 2), text_bias(&path));
    let kept = Module { file: Some(File::open(&path).unwrap()), ..module(&path) };
    std::fs::remove_file(&path).unwrap();
    let word = (BASE + (start + size / 2).wrapping_add(bias)) | FRAME_EXACT;
    let space = mapped(kept);
    assert_eq!(Symbolizer::new().stack(&space, &[word]).iter().map(said).collect::<Vec<_>>(), expected);
    std::fs::write(&path, b"another program now").unwrap();
    assert_eq!(Symbolizer::new().stack(&space, &[word]).iter().map(said).collect::<Vec<_>>(), expected);
}

#[test]
fn a_symbolizer_that_closes_its_files_keeps_names_and_drops_unreferenced_modules() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let (start, ..) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    let word = (BASE + start.wrapping_add(text_bias(&path)) + 4) | FRAME_EXACT;
    let (file, mut symbolizer) = (Arc::new(module(&path)), Symbolizer::new());
    let region = Region { start: BASE, end: BASE + (1 << 30), offset: 0, backing: Backing::File(file.clone()) };
    let space = AddressSpace::new(7, vec![region]);
    let before = symbolizer.stack(&space, &[word]);
    assert!(before.iter().any(|frame| &*frame.function == "shop::create(int)"), "{before:?}");
    symbolizer.close_files();
    assert_eq!(symbolizer.stack(&space, &[word]), before);
    assert_eq!(symbolizer.counters().lookups, 1);
    // The cache alone keeps no module alive, and with it no open file.
    drop(space);
    assert!(Arc::strong_count(&file) > 1);
    symbolizer.close_files();
    assert!(Arc::strong_count(&file) > 1, "it is still referenced");
    let weak = Arc::downgrade(&file);
    drop(file);
    symbolizer.close_files();
    assert_eq!(weak.strong_count(), 0);
}

#[test]
fn a_file_that_could_not_be_opened_is_tried_again_after_the_files_were_closed() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let (start, ..) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    let word = (BASE + start.wrapping_add(text_bias(&path)) + 4) | FRAME_EXACT;
    let space = mapped(module(&path));
    let away = dir.path().join("away");
    std::fs::rename(&path, &away).unwrap();
    let mut symbolizer = Symbolizer::new();
    let functions = |frames: Vec<Frame>| frames.iter().map(|frame| frame.function.to_string()).collect::<Vec<_>>();
    let nameless = functions(symbolizer.stack(&space, &[word]));
    assert!(!nameless.iter().any(|name| name == "shop::create(int)"), "{nameless:?}");
    std::fs::rename(&away, &path).unwrap();
    assert_eq!(functions(symbolizer.stack(&space, &[word])), nameless, "kept until the files are closed");
    symbolizer.close_files();
    let named = functions(symbolizer.stack(&space, &[word]));
    assert!(named.iter().any(|name| name == "shop::create(int)"), "{named:?}");
}

#[test]
fn a_place_without_a_symbol_is_named_by_module_and_address() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libfoo.so");
    std::fs::write(&path, b"not an ELF file").unwrap();
    let mut symbolizer = Symbolizer::new();
    let frames = symbolizer.stack(&mapped(module(&path)), &[(BASE + 0x123) | FRAME_EXACT]);
    assert_eq!(&*frames[0].function, "[libfoo.so+0x123]");
    let gone = symbolizer.stack(&mapped(module(Path::new("/nonexistent/libbar.so"))), &[BASE + 0x124]);
    assert_eq!((&*gone[0].function, gone[0].address), ("[libbar.so+0x123]", 0x123));
    assert_eq!(symbolizer.counters().unreadable_files, 1);
    let nowhere = symbolizer.stack(&AddressSpace::default(), &[0x1234 | FRAME_EXACT]);
    assert_eq!((&*nowhere[0].function, nowhere[0].address), ("[unknown]", 0x1234));
}

#[test]
fn generated_code_is_named_by_the_perf_map() {
    let anonymous = Region { start: 0x1000, end: 0x3000, offset: 0, backing: Backing::Anonymous };
    let mut space = AddressSpace::new(7, vec![anonymous]);
    let mut symbolizer = Symbolizer::new();
    let bare = symbolizer.stack(&space, &[0x1008 | FRAME_JIT]);
    assert_eq!((&*bare[0].function, bare[0].flags.jit), ("[jit]", true));
    space.set_perf_map(PerfMap::parse(b"1000 20 LazyCompile:~render shop.js:12\n"));
    let named = symbolizer.stack(&space, &[0x1008 | FRAME_JIT | FRAME_GUESSED]);
    assert_eq!((&*named[0].function, &*named[0].module), ("LazyCompile:~render shop.js:12", "[jit]"));
    assert!(named[0].flags.jit && named[0].flags.guessed);
}

#[test]
fn a_vdso_function_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("vdso");
    std::io::copy(&mut vdso_from_start(), &mut File::create(&copy).unwrap()).unwrap();
    let (start, ..) = functions(&copy, true).into_iter().find(|(.., name)| name.contains("clock_gettime")).unwrap();
    let space = AddressSpace::new(7, vec![Region { start: BASE, end: BASE + (1 << 20), offset: 0, backing: Backing::Vdso }]);
    let frames = Symbolizer::new().stack(&space, &[(BASE + start) | FRAME_EXACT]);
    assert!(frames[0].function.contains("clock_gettime"), "{:?}", frames[0]);
    assert_eq!(&*frames[0].module, "[vdso]");
}

fn vdso_from_start() -> File {
    use std::io::Seek;
    let mut image = vdso::image().unwrap();
    image.rewind().unwrap();
    image
}

#[test]
fn a_damaged_program_never_ends_the_symbolizer() {
    let dir = tempfile::tempdir().unwrap();
    let path = cpp_program(dir.path());
    let whole = std::fs::read(&path).unwrap();
    let bias = text_bias(&path);
    let (start, ..) = functions(&path, false).into_iter().find(|(.., name)| name == "shop::create(int)").unwrap();
    // A fixed sequence of pseudo-random numbers: splitmix64.
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)) as usize
    };
    let mut symbolizer = Symbolizer::new();
    for round in 0..60 {
        let mut damaged = whole.clone();
        for _ in 0..200 {
            let at = random() % damaged.len();
            damaged[at] = random() as u8;
        }
        if round % 3 == 0 {
            damaged.truncate(random() % whole.len());
        }
        // Keeps the header valid, so that the damage is in the tables.
        let kept = damaged.len().min(64);
        damaged[..kept].copy_from_slice(&whole[..kept]);
        let path = dir.path().join(format!("damaged{round}"));
        std::fs::write(&path, &damaged).unwrap();
        let frames = symbolizer.stack(&mapped(module(&path)), &[(BASE + start.wrapping_add(bias) + 4) | FRAME_EXACT]);
        assert!(!frames.is_empty());
    }
}
