//! Compiles the BPF objects with clang, for embedding.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use libbpf_cargo::SkeletonBuilder;

/// The instruction set the object is compiled for. v3 (32-bit jumps) is known to every kernel that has ring buffers (5.8); pinned,
/// because compilers' defaults move ahead of old kernels.
const BPF_CPU: &str = "-mcpu=v3";

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=bpf");
    compile("fragprof")?;
    compile("floor")
}

/// Compiles `bpf/NAME.bpf.c` to `OUT_DIR/NAME.bpf.o`.
fn compile(name: &str) -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?).join(format!("{name}.bpf.o"));
    let source = format!("bpf/{name}.bpf.c");
    let arch = env::var("CARGO_CFG_TARGET_ARCH").context("CARGO_CFG_TARGET_ARCH is not set")?;
    // Debian and Ubuntu keep asm/ in the architecture's folder, where a compiler for the BPF target does not look.
    let asm = format!("-idirafter/usr/include/{arch}-linux-gnu");
    let mut builder = SkeletonBuilder::new();
    builder.source(&source).obj(&out).clang_args([
        BPF_CPU,
        &asm,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",                   // BPF_PROG's hidden context
        "-Wno-gnu-variable-sized-type-not-at-end", // a record's header with its frames behind
    ]);
    builder
        .build()
        .with_context(|| format!("cannot compile {source}: is clang (>= 12) installed? `make deps` installs what the build needs"))
}
