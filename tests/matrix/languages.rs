//! Programs in other languages that report a ledger: their own, or that of a test program in C that runs as a library in their process.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::places::is_guest;
use crate::support::build::{LIB_DIR, Link, output_dir, program, script};
use crate::support::process::run;

/// A language, with a program for each kind of recording that it supports.
pub struct Language {
    /// Its name in the table.
    pub name: String,
    /// Allocates in many ways and ends.
    pub exact: Command,
    /// Starts short threads.
    pub threads: Option<Command>,
    /// Allocates in rounds.
    pub rounds: Option<Command>,
    /// Whether the runtime's own blocks are on the same heap as those in the ledger.
    pub is_hosted: bool,
}

fn here(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/matrix").join(file)
}

fn built(command: &mut Command) {
    let done = run(command);
    assert!(done.status.success(), "{command:?}: {}", done.err);
}

/// The test program of this name as a library.
fn hosted(name: &str) -> PathBuf {
    let out = output_dir().join(format!("lib{name}-hosted.so"));
    if is_guest() {
        return out;
    }
    let mut compiler = Command::new("cc");
    compiler.args(["-O2", "-g", "-w", "-fno-builtin", "-pthread", "-std=gnu11", "-shared", "-fPIC"]);
    compiler.arg(format!("-DPROGRAM=\"{}\"", script(&format!("{name}.c")).display()));
    built(compiler.arg(here("hosted.c")).arg("-o").arg(&out));
    out
}

/// A language whose process, `host`, runs the library given as its last argument.
fn host(name: &str, host: impl Fn() -> Command) -> Language {
    let of = |program: &str| {
        let mut command = host();
        command.arg(hosted(program));
        command
    };
    Language {
        name: name.to_owned(),
        exact: of("entry_points"),
        threads: Some(of("short_threads")),
        rounds: Some(of("rounds")),
        is_hosted: true,
    }
}

/// The path of the actual program: the one that a version manager puts in PATH may be a script.
fn python() -> PathBuf {
    run(Command::new("python3").args(["-c", "import sys; print(sys.executable)"])).out.trim().into()
}

fn java() -> Command {
    built(Command::new("javac").arg("-d").arg(output_dir()).arg(here("Hosted.java")));
    let mut java = Command::new("java");
    java.args(["-Xmx64m", "-cp"]).arg(output_dir()).arg("Hosted");
    java
}

fn node() -> Command {
    let mut node = Command::new("node");
    node.args(["-e", "process.dlopen({ exports: {} }, process.argv[1])"]);
    node
}

fn go(source: &Path) -> PathBuf {
    let out = output_dir().join(source.file_stem().unwrap());
    if is_guest() {
        return out;
    }
    let mut go = Command::new("go");
    if cfg!(target_arch = "aarch64") {
        go.env("GOARCH", "arm64").env("CC", "cc");
    }
    go.args(["build", "-o"]).arg(&out).arg(source);
    go.env("CGO_ENABLED", "1").env("GO111MODULE", "off").env("CGO_CFLAGS", format!("-O2 -g -fno-builtin -I{}", script("").display()));
    built(&mut go);
    out
}

/// What Rust programs are built for.
fn target() -> String {
    format!("{}-unknown-linux-gnu", std::env::consts::ARCH)
}

/// A Rust program on the system's allocator.
fn rust() -> PathBuf {
    let out = output_dir().join("with_rust");
    if !is_guest() {
        let mut rustc = Command::new("rustc");
        rustc.args(["-O", "-g", "--edition", "2024", "-C", "linker=cc", "--target", &target()]);
        built(rustc.arg("-o").arg(&out).arg(script("with_rust.rs")));
    }
    out
}

/// The same on an allocator that Rust programs link into themselves, whose functions have names of their own.
fn rust_on(name: &str) -> PathBuf {
    let (home, folder) = (here(name), output_dir().join(name));
    let out = folder.join(target()).join("release").join(name);
    if is_guest() {
        return out;
    }
    let mut cargo = Command::new("cargo");
    cargo.current_dir(&home).args(["build", "--release", "--locked", "--target", &target(), "--target-dir"]).arg(&folder);
    // Builds the allocator, which takes longer than the limit of one minute for programs.
    let done = cargo.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    out
}

/// All of them.
pub fn all() -> Vec<Language> {
    let once = |name: &str, exact: Command| Language { name: name.to_owned(), exact, threads: None, rounds: None, is_hosted: false };
    let in_rounds = |name: &str, program: &Path| {
        let mut rounds = Command::new(program);
        rounds.arg("rounds");
        Language { rounds: Some(rounds), ..once(name, Command::new(program)) }
    };
    let cpp = program("new_delete", Link::Dynamic);
    let on = |library: &str| {
        let mut command = Command::new(&cpp);
        command.env("LD_PRELOAD", Path::new(LIB_DIR).join(library));
        command
    };
    let hosting = go(&here("hosted.go"));
    let mut all = vec![
        once("C++, every form of new and delete, glibc", Command::new(&cpp)),
        once("C++ on jemalloc 5.3.0", on("libjemalloc.so.2")),
        once("C++ on tcmalloc 2.10", on("libtcmalloc_minimal.so.4")),
        once("C++ on mimalloc 2.0", on("libmimalloc.so.2")),
        in_rounds("Rust, system allocator", &rust()),
        in_rounds("Rust, jemalloc linked into it", &rust_on("rust_on_jemalloc")),
        in_rounds("Rust, mimalloc 3 linked into it", &rust_on("rust_on_mimalloc")),
        in_rounds("Rust, snmalloc linked into it", &rust_on("rust_on_snmalloc")),
        once("Go with cgo, C called from goroutines", Command::new(go(&script("with_cgo.go")))),
        host("Go with cgo, a C library", || Command::new(&hosting)),
    ];
    // Other runtimes that host a C library have no row on arm64: in its guests they are tried by `super::managed`.
    if cfg!(target_arch = "x86_64") {
        let python = python();
        let in_python = || {
            let mut command = Command::new(&python);
            command.args(["-c", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).hosted_run()"]);
            command
        };
        all.extend([host("Python, a C library", in_python), host("Node, an addon", node), host("Java, a JNI library", java)]);
    }
    all
}
