//! The sampler's libraries as files, and programs compiled for these tests.

use std::path::{Path, PathBuf};
use std::process::Command;

use fragprof::sampler::library::{self, Flavour};
use tempfile::TempDir;

use crate::support::build::LIB_DIR;
use crate::support::process::run;

/// A directory with the two libraries for this test alone: a consumer attached to the file sees only this test's programs.
pub struct Libraries(TempDir);

impl Libraries {
    /// Writes them.
    pub fn new() -> Self {
        let directory = TempDir::new().unwrap();
        library::install(directory.path()).unwrap();
        Self(directory)
    }

    /// The library's path.
    pub fn path(&self, flavour: Flavour) -> PathBuf {
        self.0.path().join(flavour.file_name())
    }

    /// The directory, for other files of a test.
    pub fn folder(&self) -> &Path {
        self.0.path()
    }
}

/// An allocator under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocator {
    /// The C library's.
    Glibc,
    /// Preloaded behind the sampler.
    Jemalloc,
    /// Preloaded behind the sampler.
    Tcmalloc,
    /// Preloaded behind the sampler.
    Mimalloc,
}

impl Allocator {
    /// Its library.
    pub fn library(self) -> Option<String> {
        let name = match self {
            Self::Glibc => return None,
            Self::Jemalloc => "libjemalloc.so.2",
            Self::Tcmalloc => "libtcmalloc_minimal.so.4",
            Self::Mimalloc => "libmimalloc.so.2",
        };
        Some(format!("{LIB_DIR}/{name}"))
    }

    /// The value of LD_PRELOAD: the sampler, then the allocator.
    pub fn preload(self, sampler: &Path) -> String {
        let mut value = sampler.display().to_string();
        if let Some(library) = self.library() {
            value.push(':');
            value.push_str(&library);
        }
        value
    }
}

/// A command with the sampler preloaded before an allocator. The interval is constant, whatever the rate of samples and the call site.
pub fn sampled(program: impl AsRef<Path>, sampler: &Path, allocator: Allocator, sample_bytes: u64) -> Command {
    let mut command = Command::new(program.as_ref());
    command.env("LD_PRELOAD", allocator.preload(sampler)).env("FRAGPROF_SAMPLE_BYTES", sample_bytes.to_string());
    command.env("FRAGPROF_SAMPLES_PER_SECOND", "0").env("FRAGPROF_SAMPLE_BY_SITE", "0");
    command
}

/// The same, with the intervals that programs have by default.
pub fn sampled_by_site(program: impl AsRef<Path>, sampler: &Path, allocator: Allocator, sample_bytes: u64) -> Command {
    let mut command = sampled(program, sampler, allocator, sample_bytes);
    command.env_remove("FRAGPROF_SAMPLES_PER_SECOND").env_remove("FRAGPROF_SAMPLE_BY_SITE");
    command
}

/// Compiles `tests/sampler/programs/NAME` into a folder.
pub fn compile(folder: &Path, name: &str, compiler: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/sampler/programs").join(name);
    compile_source(folder, &source, compiler, flags)
}

/// Compiles any source into a folder.
pub fn compile_source(folder: &Path, source: &Path, compiler: &str, flags: &[&str]) -> PathBuf {
    let out = folder.join(format!("{}-{compiler}", source.file_name().unwrap().to_string_lossy()));
    let mut command = Command::new(compiler);
    command.args(["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-pthread"]).arg(source).arg("-o").arg(&out).args(flags);
    let done = run(&mut command);
    assert!(done.status.success(), "{command:?}\n{}", done.err);
    out
}
