//! Shared by the tests: the unwinder's BPF programs loaded into this kernel, and small programs compiled by the tests.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fragprof::capture::{Counters, Tables};
use fragprof::process::{Backing, Maps, Process};
use fragprof::units::Pid;
use fragprof::unwind::End;
use libbpf_rs::{Link, MapCore as _, MapFlags, Object, ObjectBuilder, UprobeOpts};
use tempfile::TempDir;

/// The repository's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command to its end and panics with its output if it fails.
pub fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}\n{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Compiles a C or C++ program of `tests/unwind/programs` with these flags.
pub fn compile(directory: &Path, source: &str, name: &str, flags: &[&str]) -> PathBuf {
    let compiler = if source.ends_with(".cc") { "g++" } else { "gcc" };
    let out = directory.join(name);
    run(Command::new(compiler).arg(root().join("tests/unwind/programs").join(source)).arg("-o").arg(&out).args(flags));
    out
}

/// `deep.c` as a static program with musl, whose own functions have no unwind rows.
pub fn compile_musl(directory: &Path) -> PathBuf {
    let out = directory.join("musl");
    let source = root().join("tests/unwind/programs/deep.c");
    run(Command::new("musl-gcc").args(["-O2", "-static", "-fasynchronous-unwind-tables"]).arg(source).arg("-o").arg(&out));
    out
}

/// A child that is killed when it goes out of scope.
pub struct Target(pub Child);

impl Target {
    /// Starts a program with its output discarded and its input open.
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Self {
        Self(Command::new(program).args(arguments).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A stack as stored by the BPF program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Hash of the frames and the end.
    pub hash: u64,
    /// Walks so far.
    pub walks: u64,
    /// Why it ended.
    pub end: End,
    /// Frame words, leaf first.
    pub frames: Vec<u64>,
}

/// The test programs, loaded.
pub struct Lab {
    /// The loaded object.
    pub object: Object,
    /// Its tables.
    pub tables: Tables,
    _directory: TempDir,
}

impl Lab {
    /// Compiles and loads `tests/unwind/unwind_test.bpf.c`.
    pub fn new() -> Self {
        let directory = TempDir::new().unwrap();
        let headers = directory.path().join("bpf");
        fs::create_dir(&headers).unwrap();
        for (name, text) in libbpf_sys::API_HEADERS {
            fs::write(headers.join(name), text).unwrap();
        }
        let out = directory.path().join("unwind_test.bpf.o");
        let mut clang = Command::new("clang");
        clang
            .args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-D__TARGET_ARCH_x86", "-Wall", "-Wno-gnu-variable-sized-type-not-at-end"])
            .arg("-I")
            .arg(directory.path())
            .arg(format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH))
            .arg("-c")
            .arg(root().join("tests/unwind/unwind_test.bpf.c"))
            .arg("-o")
            .arg(&out);
        run(&mut clang);
        let object = ObjectBuilder::default().open_file(&out).unwrap().load().unwrap();
        let tables = Tables::new(&object, 64 << 20).unwrap();
        Self { object, tables, _directory: directory }
    }

    /// Loads all of the process's tables into the kernel.
    pub fn watch(&self, pid: u32) -> Process {
        let process = Process::open(Pid(pid)).unwrap();
        let maps = process.maps().unwrap();
        let begun = Instant::now();
        let report = self.tables.sync_process(&process, pid, &maps).unwrap();
        eprintln!("{}: {report:?} in {:?}", process.comm(), begun.elapsed());
        assert!(self.tables.wait_until_loaded(Duration::from_secs(60)));
        process
    }

    /// Attaches a program to a function's first instruction.
    pub fn attach(&self, program: &str, pid: u32, file: &Path, offset: u64) -> Link {
        let program = self.object.progs_mut().find(|p| p.name() == program).unwrap();
        program.attach_uprobe_with_opts(pid as i32, file, offset as usize, UprobeOpts::default()).unwrap()
    }

    /// Attaches a program to a function's returns.
    pub fn attach_return(&self, program: &str, pid: u32, file: &Path, offset: u64) -> Link {
        let program = self.object.progs_mut().find(|p| p.name() == program).unwrap();
        let opts = UprobeOpts { retprobe: true, ..Default::default() };
        program.attach_uprobe_with_opts(pid as i32, file, offset as usize, opts).unwrap()
    }

    /// The programs' counters.
    pub fn counters(&self) -> Counters {
        let map = self.object.maps().find(|map| map.name() == "counters").unwrap();
        Counters::from_rows(&map.lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap())
    }

    /// The last stack taken.
    pub fn last(&self) -> Stack {
        let map = self.object.maps().find(|map| map.name() == "last").unwrap();
        let bytes = map.lookup(&0u32.to_ne_bytes(), MapFlags::ANY).unwrap().unwrap();
        let word = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        let half = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let frames = (0..half(24) as usize).map(|i| word(32 + 8 * i)).collect();
        let end = End::from_wire(half(28) as u8).unwrap_or(End::NoProgress);
        Stack { hash: word(0), walks: word(8), end, frames }
    }
}

/// The libc that a process maps, and a function's file offset in it, from its dynamic symbols.
pub fn libc_function(process: &Process, function: &str) -> (PathBuf, u64) {
    let maps: Maps = process.maps().unwrap();
    let path = maps
        .executable_files()
        .filter_map(|mapping| match &mapping.backing {
            Backing::File { path, .. } => Some(path.clone()),
            _ => None,
        })
        .find(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libc.so")))
        .unwrap();
    let offset = symbol_offset(&path, function);
    (path, offset)
}

/// A symbol's file offset, from nm and the program headers.
pub fn symbol_offset(path: &Path, function: &str) -> u64 {
    for flags in [&["--dynamic"][..], &[]] {
        let output = Command::new("nm").args(flags).arg("--defined-only").arg(path).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let address = text.lines().find_map(|line| {
            let mut fields = line.split_whitespace();
            let address = fields.next()?;
            let name = fields.nth(1)?;
            (name.split('@').next() == Some(function)).then(|| u64::from_str_radix(address, 16).unwrap())
        });
        if let Some(address) = address {
            let file = fs::File::open(path).unwrap();
            return fragprof::process::elf::Elf::parse(file).unwrap().offset_of(address).unwrap().0;
        }
    }
    panic!("{} has no symbol {function}", path.display());
}
