//! Where a test program runs: with the C library of some suite and an allocator preloaded before it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::build::{LIB_DIR, compile, script};

/// Fetches and unpacks packages.
const FETCH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/fetch-suite.sh");
/// glibc's dynamic linker.
const LOADER: &str = if cfg!(target_arch = "aarch64") { "ld-linux-aarch64.so.1" } else { "ld-linux-x86-64.so.2" };

/// How programs are linked.
#[derive(Clone)]
enum Toolchain {
    /// The machine's own.
    Own,
    /// Linked against the unpacked packages of another suite.
    Sysroot(PathBuf),
    /// musl, with its loader or static.
    Musl { is_static: bool },
}

/// A C library and an allocator.
pub struct Place {
    /// Its name in the table.
    pub name: String,
    toolchain: Toolchain,
    preload: Option<PathBuf>,
}

impl Place {
    /// The test program of this name, built for the place.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(self.build(program));
        if let Some(library) = &self.preload {
            command.env("LD_PRELOAD", library);
        }
        command
    }

    /// Builds the test program of this name, unless it is there.
    pub fn build(&self, program: &str) -> PathBuf {
        let source = script(&format!("{program}.c"));
        let key: String = self.name.chars().filter(char::is_ascii_alphanumeric).collect();
        let mut args = ["-O2", "-g", "-w", "-fno-builtin", "-pthread", "-std=gnu11"].map(str::to_owned).to_vec();
        match &self.toolchain {
            Toolchain::Own => {}
            Toolchain::Sysroot(root) => {
                let (libraries, lib) = (root.join(&LIB_DIR[1..]), root.join(&LIB_DIR["/usr/".len()..]));
                let (libraries, lib) = (libraries.display(), lib.display());
                // Without the second, the start files and libraries next to the compiler are used.
                args.extend([
                    format!("--sysroot={}", root.display()),
                    format!("-B{libraries}"),
                    format!("-L{libraries}"),
                    format!("-L{lib}"),
                ]);
                // The old form of the search path also applies to the dependencies of a preloaded library.
                args.push(format!("-Wl,--disable-new-dtags,-rpath,{lib}:{libraries}"));
                args.push(format!("-Wl,--dynamic-linker={lib}/{LOADER}"));
            }
            Toolchain::Musl { is_static } => {
                // musl has neither pvalloc nor a way to ask which library serves malloc.
                args.push("-DTRUTH_STATIC".to_owned());
                args.extend(is_static.then(|| "-static".to_owned()));
            }
        }
        args.extend([source.display().to_string(), "-ldl".to_owned()]);
        let compiler = if matches!(self.toolchain, Toolchain::Musl { .. }) { "musl-gcc" } else { "cc" };
        compile(compiler, &args, &source, &format!("{program}-matrix-{key}"), &[])
    }
}

/// Whether this is a guest of `scripts/matrix/arm64.sh`, which has what was built and fetched for it, and nothing to build or fetch with.
pub fn is_guest() -> bool {
    !Path::new(FETCH).exists()
}

/// The packages of a suite, unpacked.
pub fn suite(name: &str, packages: &[&str]) -> PathBuf {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "" };
    let root =
        home.join("target/suite-roots").join(if architecture.is_empty() { name.to_owned() } else { format!("{name}-{architecture}") });
    if is_guest() {
        return root;
    }
    // Since these directories were merged, packages contain only the one under usr.
    std::fs::create_dir_all(root.join("usr")).unwrap();
    let mut fetch = Command::new(FETCH);
    let done = fetch.current_dir(home).env("ARCHITECTURE", architecture).arg(name).arg(&root).args(packages).output().unwrap();
    assert!(done.status.success(), "cannot fetch {packages:?} of {name}: {}", String::from_utf8_lossy(&done.stderr));
    for merged in ["lib", "lib64"] {
        if root.join("usr").join(merged).exists() && !root.join(merged).exists() {
            std::os::unix::fs::symlink(format!("usr/{merged}"), root.join(merged)).unwrap();
        }
    }
    root
}

/// Packages that a program needs to be linked and run.
pub const C_LIBRARY: [&str; 5] = ["libc6", "libc6-dev", "linux-libc-dev", "libgcc-s1", "libcrypt-dev"];

/// All places.
pub fn all() -> Vec<Place> {
    let place = |name: &str, toolchain: &Toolchain, preload: Option<PathBuf>| Place {
        name: name.to_owned(),
        toolchain: toolchain.clone(),
        preload,
    };
    let with = |more: &[&'static str]| -> Vec<&'static str> { C_LIBRARY.into_iter().chain(more.iter().copied()).collect() };
    let of = |root: &Path, library: &str| Some(root.join(&LIB_DIR[1..]).join(library));
    let bullseye = suite("bullseye", &with(&["libjemalloc2", "libstdc++6"]));
    let trixie = suite("trixie", &with(&["libjemalloc2", "libmimalloc3", "libtcmalloc-minimal4t64", "libstdc++6"]));
    let sid = suite("sid", &with(&[]));
    // bookworm's are those of this machine. Where programs are cross-compiled, no machine has them.
    let is_own = cfg!(target_arch = "x86_64");
    let bookworm = if is_own {
        PathBuf::from("/")
    } else {
        suite("bookworm", &with(&["libjemalloc2", "libmimalloc2.0", "libtcmalloc-minimal4", "libstdc++6"]))
    };
    let bookworm_c = if is_own { Toolchain::Own } else { Toolchain::Sysroot(bookworm.clone()) };
    let (bullseye_c, trixie_c, sid_c) = (Toolchain::Sysroot(bullseye.clone()), Toolchain::Sysroot(trixie.clone()), Toolchain::Sysroot(sid));
    vec![
        place("glibc 2.31", &bullseye_c, None),
        place("glibc 2.36", &bookworm_c, None),
        place("glibc 2.41", &trixie_c, None),
        place("glibc of sid", &sid_c, None),
        place("musl, dynamic", &Toolchain::Musl { is_static: false }, None),
        place("musl, static", &Toolchain::Musl { is_static: true }, None),
        place("jemalloc 5.2.1", &bullseye_c, of(&bullseye, "libjemalloc.so.2")),
        place("jemalloc 5.3.0", &bookworm_c, of(&bookworm, "libjemalloc.so.2")),
        place("jemalloc of trixie", &trixie_c, of(&trixie, "libjemalloc.so.2")),
        place("tcmalloc 2.10", &bookworm_c, of(&bookworm, "libtcmalloc_minimal.so.4")),
        place("tcmalloc of trixie", &trixie_c, of(&trixie, "libtcmalloc_minimal.so.4")),
        place("mimalloc 2.0", &bookworm_c, of(&bookworm, "libmimalloc.so.2")),
        place("mimalloc 3", &trixie_c, of(&trixie, "libmimalloc.so.3")),
    ]
}
