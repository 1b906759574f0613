//! Programs of these tests, and commands with the sampler.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::process::run;
use crate::support::recording::fragprof;

/// Environment variables for a program, with their values.
pub type Environment<'a> = &'a [(&'a str, &'a str)];

/// Compiles `tests/emitter/programs/NAME` into a folder, under a name of its own.
pub fn compile(folder: &Path, name: &str, as_name: &str, flags: &[&str]) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/emitter/programs").join(name);
    let out = folder.join(as_name);
    let mut command = Command::new("cc");
    command.args(["-g", "-Wall", "-Wextra", "-Werror", "-fno-builtin", "-pthread"]).args(flags).arg(source).arg("-o").arg(&out);
    let done = run(&mut command);
    assert!(done.status.success(), "{command:?}\n{}", done.err);
    out
}

/// `fragprof run --sample-bytes N -- PROGRAM`. The interval does not change, however frequent samples are.
pub fn sampled(program: &Path, sample_bytes: u64) -> Command {
    limited(program, sample_bytes, 0)
}

/// The same with an interval that grows where samples would be more frequent than so many per second and CPU.
pub fn limited(program: &Path, sample_bytes: u64, samples_per_second: u64) -> Command {
    let mut command = fragprof();
    command.args(["run", "--sample-bytes", &sample_bytes.to_string(), "--samples-per-second", &samples_per_second.to_string(), "--"]);
    command.arg(program);
    command
}
