//! Where a test program runs: with the C library of some suite and an allocator preloaded before it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::build::{LIB_DIR, output_dir, script};
use crate::support::process::run;

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
    pub fn command(&self, program: &str, args: &[&str]) -> Command {
        let mut command = Command::new(self.build(program));
        command.args(args);
        if let Some(library) = &self.preload {
            command.env("LD_PRELOAD", library);
        }
        command
    }

    fn build(&self, program: &str) -> PathBuf {
        let source = script(&format!("{program}.c"));
        let key: String = self.name.chars().filter(char::is_ascii_alphanumeric).collect();
        let out = output_dir().join(format!("{program}-matrix-{key}"));
        let mut compiler = Command::new(if matches!(self.toolchain, Toolchain::Musl { .. }) { "musl-gcc" } else { "cc" });
        compiler.args(["-O2", "-g", "-w", "-fno-builtin", "-pthread", "-std=gnu11"]);
        match &self.toolchain {
            Toolchain::Own => {}
            Toolchain::Sysroot(root) => {
                let libraries = root.join("usr/lib/x86_64-linux-gnu");
                let lib = root.join("lib/x86_64-linux-gnu");
                compiler.arg(format!("--sysroot={}", root.display()));
                // Otherwise the start files and libraries next to the compiler are used.
                compiler.arg(format!("-B{}", libraries.display())).arg("-L").arg(&libraries).arg("-L").arg(&lib);
                // The old form of the search path also applies to the dependencies of a preloaded library.
                compiler.arg(format!("-Wl,--disable-new-dtags,-rpath,{}:{}", lib.display(), libraries.display()));
                compiler.arg(format!("-Wl,--dynamic-linker={}", lib.join("ld-linux-x86-64.so.2").display()));
            }
            Toolchain::Musl { is_static } => {
                // musl has neither pvalloc nor a way to ask which library serves malloc.
                compiler.arg("-DTRUTH_STATIC");
                if *is_static {
                    compiler.arg("-static");
                }
            }
        }
        let done = run(compiler.arg(&source).arg("-ldl").arg("-o").arg(&out));
        assert!(done.status.success(), "{}: {}", self.name, done.err);
        out
    }
}

/// The packages of a suite, unpacked.
pub fn suite(name: &str, packages: &[&str]) -> PathBuf {
    let home = Path::new(env!("CARGO_MANIFEST_DIR"));
    let root = home.join("target/suite-roots").join(name);
    // Since these directories were merged, packages contain only the one under usr.
    std::fs::create_dir_all(root.join("usr")).unwrap();
    let done = Command::new(home.join("scripts/fetch-suite.sh")).current_dir(home).arg(name).arg(&root).args(packages).output().unwrap();
    assert!(done.status.success(), "cannot fetch {packages:?} of {name}: {}", String::from_utf8_lossy(&done.stderr));
    for merged in ["lib", "lib64"] {
        if !root.join(merged).exists() {
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
    let own = |library: &str| Some(Path::new(LIB_DIR).join(library));
    let of = |root: &Path, library: &str| Some(root.join("usr/lib/x86_64-linux-gnu").join(library));
    let bullseye = suite("bullseye", &with(&["libjemalloc2", "libstdc++6"]));
    let trixie = suite("trixie", &with(&["libjemalloc2", "libmimalloc3", "libtcmalloc-minimal4t64", "libstdc++6"]));
    let sid = suite("sid", &with(&[]));
    let (bullseye_c, trixie_c, sid_c) = (Toolchain::Sysroot(bullseye.clone()), Toolchain::Sysroot(trixie.clone()), Toolchain::Sysroot(sid));
    vec![
        place("glibc 2.31", &bullseye_c, None),
        place("glibc 2.36", &Toolchain::Own, None),
        place("glibc 2.41", &trixie_c, None),
        place("glibc of sid", &sid_c, None),
        place("musl, dynamic", &Toolchain::Musl { is_static: false }, None),
        place("musl, static", &Toolchain::Musl { is_static: true }, None),
        place("jemalloc 5.2.1", &bullseye_c, of(&bullseye, "libjemalloc.so.2")),
        place("jemalloc 5.3.0", &Toolchain::Own, own("libjemalloc.so.2")),
        place("jemalloc of trixie", &trixie_c, of(&trixie, "libjemalloc.so.2")),
        place("tcmalloc 2.10", &Toolchain::Own, own("libtcmalloc_minimal.so.4")),
        place("tcmalloc of trixie", &trixie_c, of(&trixie, "libtcmalloc_minimal.so.4")),
        place("mimalloc 2.0", &Toolchain::Own, own("libmimalloc.so.2")),
        place("mimalloc 3", &trixie_c, of(&trixie, "libmimalloc.so.3")),
    ]
}
