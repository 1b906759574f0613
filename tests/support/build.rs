//! Compiles the test programs, once for each state of their sources, into `target/testprogs`.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// How a test program gets its allocator at link time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Link {
    /// The C library's.
    Dynamic,
    /// A shared library named on the link line.
    Jemalloc,
    /// As above.
    Tcmalloc,
    /// As above.
    Mimalloc,
    /// The whole program static, with glibc.
    StaticGlibc,
    /// The whole program static, with musl.
    StaticMusl,
    /// The whole program static, with jemalloc linked before glibc.
    StaticJemalloc,
    /// tcmalloc linked into a program that is dynamic otherwise.
    TcmallocInside,
}

/// Where Debian keeps the allocators' libraries.
pub const LIB_DIR: &str = if cfg!(target_arch = "aarch64") { "/usr/lib/aarch64-linux-gnu" } else { "/usr/lib/x86_64-linux-gnu" };

const COMMON: &[&str] = &["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-pthread"];

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testprogs")
}

/// The directory for all build output; it is kept after the test run.
pub fn output_dir() -> PathBuf {
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("testprogs");
    fs::create_dir_all(&dir).expect("target/testprogs can be created");
    dir
}

/// Copies a program, to be started under another name. A child writes the copy: were it open for writing here, a process
/// that another test starts at the same moment would inherit it, and the copy could not be started (`ETXTBSY`).
pub fn install(from: &Path, to: &Path) {
    let done = Command::new("install").args(["-m", "755"]).args([from, to]).output().expect("install(1) can be run");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Path of a source in `tests/testprogs` that needs no compiling.
pub fn script(name: &str) -> PathBuf {
    sources().join(name)
}

/// Builds test program `name` (a C or C++ source without its extension) and returns its path.
pub fn program(name: &str, link: Link) -> PathBuf {
    let cpp = sources().join(format!("{name}.cpp"));
    let is_cpp = cpp.exists();
    let source = if is_cpp { cpp } else { sources().join(format!("{name}.c")) };
    let compiler = match (is_cpp, link) {
        (true, _) => "g++",
        (false, Link::StaticMusl) => "musl-gcc",
        (false, _) => "cc",
    };
    let mut args: Vec<String> = COMMON.iter().map(ToString::to_string).collect();
    args.push(if is_cpp { "-std=gnu++17" } else { "-std=gnu11" }.into());
    let own = match name {
        "jemalloc_api" => &["-ljemalloc"][..],
        "mimalloc_api" => &["-lmimalloc"],
        _ => &[],
    };
    let jemalloc_static = format!("{LIB_DIR}/libjemalloc.a");
    let tcmalloc_static = format!("{LIB_DIR}/libtcmalloc_minimal.a");
    let link_args: &[&str] = match link {
        Link::Dynamic => own,
        Link::Jemalloc => &["-Wl,--no-as-needed", "-ljemalloc"],
        Link::Tcmalloc => &["-Wl,--no-as-needed", "-ltcmalloc_minimal"],
        Link::Mimalloc => &["-Wl,--no-as-needed", "-lmimalloc"],
        Link::StaticGlibc | Link::StaticMusl => &["-static", "-DTRUTH_STATIC"],
        Link::StaticJemalloc => &["-static", "-DTRUTH_STATIC", &jemalloc_static, "-lstdc++", "-lm"],
        Link::TcmallocInside => &["-DTRUTH_STATIC", "-Wl,--whole-archive", &tcmalloc_static, "-Wl,--no-whole-archive", "-lstdc++", "-lm"],
    };
    args.push(source.display().to_string());
    args.extend(link_args.iter().map(ToString::to_string));
    compile(compiler, &args, &source, &format!("{name}-{link:?}").to_lowercase(), &[])
}

/// Builds a C program that is a single file.
pub fn standalone(source: &Path, more: &[&str]) -> PathBuf {
    let mut args: Vec<String> = COMMON.iter().map(ToString::to_string).collect();
    args.push(source.display().to_string());
    args.extend(more.iter().map(ToString::to_string));
    let name = source.file_stem().expect("a source has a name").to_string_lossy().into_owned();
    compile("cc", &args, source, &name, &[])
}

/// Builds the benchmark's target, a tight loop of malloc and free.
pub fn tight_pairs() -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/exact/tight_pairs.c");
    let mut args: Vec<String> = COMMON.iter().map(ToString::to_string).collect();
    args.push(source.display().to_string());
    compile("cc", &args, &source, "tight_pairs", &[])
}

/// Builds the library for `dlopen`: plain, or with an allocator of its own whose symbols are local.
pub fn plugin(own_allocator: bool) -> PathBuf {
    let source = sources().join("plugin.c");
    let mut args: Vec<String> = COMMON.iter().map(ToString::to_string).collect();
    args.extend(["-shared".into(), "-fPIC".into(), source.display().to_string()]);
    if own_allocator {
        args.push(format!("{LIB_DIR}/libjemalloc_pic.a"));
        args.extend(["-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-lstdc++", "-lm"].map(String::from));
    }
    compile("cc", &args, &source, if own_allocator { "plugin-own.so" } else { "plugin.so" }, &[])
}

/// Builds the Go program, without cgo: an executable that has no C library at all.
pub fn go_program() -> PathBuf {
    let source = sources().join("without_libc.go");
    // `go build -o OUT FILE`: the flag's value must come before the file.
    let out = output_dir().join("without_libc");
    let args = ["build".into(), "-o".into(), out.display().to_string(), source.display().to_string()];
    compile("go", &args, &source, "without_libc", &[("CGO_ENABLED", "0"), ("GO111MODULE", "off")])
}

/// Runs the compiler unless the output of the same sources and command exists. `env` is added to the environment.
pub fn compile(compiler: &str, args: &[String], source: &Path, name: &str, env: &[(&str, &str)]) -> PathBuf {
    keep(name, (compiler, args, env), &[source, &sources().join("truth.h")], |out| {
        let mut command = Command::new(compiler);
        command.args(args).envs(env.iter().copied());
        if compiler != "go" {
            command.arg("-o").arg(out);
        }
        let done = command.output().unwrap_or_else(|e| panic!("cannot run {compiler}: {e} (is it installed?)"));
        assert!(done.status.success(), "{compiler} {args:?} failed:\n{}", String::from_utf8_lossy(&done.stderr));
    })
}

/// A file of the output directory, made unless it is there for the same sources, made in the same way.
pub fn keep(name: &str, way: impl Hash, sources: &[&Path], make: impl FnOnce(&Path)) -> PathBuf {
    let out = output_dir().join(name);
    let key_file = output_dir().join(format!("{name}.key"));
    // Other tests of this run, and of another run, may build the same program.
    let lock = File::create(output_dir().join(format!("{name}.lock"))).expect("the lock file can be created");
    lock.lock().expect("the lock can be taken");

    let mut hasher = DefaultHasher::new();
    way.hash(&mut hasher);
    for input in sources {
        fs::read(input).unwrap_or_else(|e| panic!("cannot read {}: {e}", input.display())).hash(&mut hasher);
    }
    let key = format!("{:016x}", hasher.finish());
    if out.exists() && fs::read_to_string(&key_file).is_ok_and(|k| k == key) {
        return out;
    }
    make(&out);
    fs::write(&key_file, key).expect("the key can be written");
    out
}

/// The path of `name` in PATH; skips the test if it is not installed.
pub fn tool(name: &str) -> Option<PathBuf> {
    let found = std::env::var_os("PATH")
        .and_then(|path| std::env::split_paths(&path).map(|dir| dir.join(name)).find(|candidate| candidate.is_file()));
    if found.is_none() {
        let mut reason = String::new();
        write!(reason, "{name} is not installed").expect("writing to a string works");
        return super::skip(&reason);
    }
    found
}
