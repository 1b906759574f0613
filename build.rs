//! Compiles the embedded objects: the BPF objects, with clang; the preload sampler and the scratch program, with the C compiler. Generates
//! the Rust side of the types that the BPF programs and the daemon share.

use std::env;
use std::path::PathBuf;

use anyhow::{Context as _, Result, ensure};
use libbpf_cargo::SkeletonBuilder;

#[path = "build/bindings.rs"]
mod bindings;

/// The instruction set the object is compiled for. v3 (32-bit jumps) is known to every kernel that has ring buffers (5.8); pinned,
/// because compilers' defaults move ahead of old kernels.
const BPF_CPU: &str = "-mcpu=v3";

/// The preload libraries' sources.
const SAMPLER: &str = "src/sampler/preload";
/// Of the library that samples.
const SAMPLER_SOURCES: [&str; 11] =
    ["clock.c", "first.c", "limit.c", "next.c", "operators.c", "probes.c", "sample.c", "sampler.c", "set.c", "site.c", "strings.c"];
/// Of the library that records every call.
const RECORDER_SOURCES: [&str; 13] = [
    "cfi.c",
    "clock.c",
    "first.c",
    "memory.c",
    "modules.c",
    "next.c",
    "operators.c",
    "record.c",
    "recorder.c",
    "recorder_thread.c",
    "stacks.c",
    "strings.c",
    "walk.c",
];
/// What makes a library one for programs that run.
const ATTACHED: [&str; 4] = ["-DFRAGPROF_ATTACHED", "-DFRAGPROF_ALLOCX", "allocx.c", "attach.c"];
/// The program with which a C library's allocator is run.
const SCRATCH: &str = "src/selective/scratch.c";
/// The program that makes a trace's calls, and what stands for the C library while it is linked.
const PLAYER: [&str; 3] = ["src/replay/player.c", "src/replay/player.h", "src/replay/stubs.c"];

fn main() -> Result<()> {
    // Everything that depends on registers and instructions is in src/machine/ and bpf/machine_*.bpf.h.
    let arch = target_arch()?;
    ensure!(matches!(&*arch, "x86_64" | "aarch64"), "fragprof watches x86-64 and arm64 processes only and cannot be built for {arch}");
    println!("cargo::rerun-if-changed=bpf");
    compile("fragprof", "fragprof", &[])?;
    // For kernels before 5.17; bpf/kernel.bpf.h describes the differences.
    compile("fragprof", "fragprof_legacy", &["-DFP_LEGACY"])?;
    compile("floor", "floor", &[])?;
    compile("registers", "registers", &[])?;
    write_bindings()?;
    println!("cargo::rerun-if-changed={SAMPLER}");
    link_preload("libfragprof_sampler.so", &SAMPLER_SOURCES, &[])?;
    link_preload("libfragprof_sampler_jemalloc.so", &SAMPLER_SOURCES, &["-DFRAGPROF_ALLOCX", "allocx.c"])?;
    link_preload("libfragprof_attached.so", &SAMPLER_SOURCES, &[&ATTACHED[..], &["attached_sampler.c", "memory.c", "thread.c"]].concat())?;
    // Frame pointers: by them it finds the registers of its callers (walk.h).
    let recorder = ["-DFRAGPROF_RECORDER", "-fno-omit-frame-pointer"];
    link_preload("libfragprof_recorder.so", &RECORDER_SOURCES, &recorder)?;
    link_preload("libfragprof_recorder_jemalloc.so", &RECORDER_SOURCES, &[&recorder[..], &["-DFRAGPROF_ALLOCX", "allocx.c"]].concat())?;
    let attached = [&recorder[..], &ATTACHED, &["attached_recorder.c"]].concat();
    link_preload("libfragprof_attached_recorder.so", &RECORDER_SOURCES, &attached)?;
    link_preload("libfragprof_python.so", &["python.c"], &[])?;
    for source in PLAYER {
        println!("cargo::rerun-if-changed={source}");
    }
    link_player()?;
    println!("cargo::rerun-if-changed={SCRATCH}");
    // The scratch program uses registers of x86-64.
    if arch == "x86_64" { link_scratch() } else { Ok(()) }
}

/// Writes `OUT_DIR/shared.rs`, which `src/bpf.rs` includes.
fn write_bindings() -> Result<()> {
    compile("shared", "shared", &[])?;
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let rust = bindings::generate(&out.join("shared.bpf.o")).context("cannot generate Rust from the types of bpf/shared.bpf.c")?;
    std::fs::write(out.join("shared.rs"), rust).context("cannot write shared.rs")
}

/// The instruction set of the program that is built, whatever the build machine.
fn target_arch() -> Result<String> {
    env::var("CARGO_CFG_TARGET_ARCH").context("CARGO_CFG_TARGET_ARCH is not set")
}

/// Links a preload library to `OUT_DIR/NAME`: a library that needs no other, so that it can be preloaded under any libc.
fn link_preload(name: &str, sources: &[&str], more: &[&str]) -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?).join(name);
    // The flags do not depend on the profile: the library runs in other programs.
    let compiler = cc::Build::new()
        .no_default_flags(true)
        .try_get_compiler()
        .context("no C compiler was found: `make deps` installs what the build needs")?;
    let status = compiler
        .to_command()
        .current_dir(SAMPLER)
        .args(["-std=gnu11", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror"])
        .args(["-ffreestanding", "-fno-stack-protector", "-fno-tree-loop-distribute-patterns"]) // no call of a libc, not even memset
        .args(["-fvisibility=hidden", "-ftls-model=initial-exec"])
        .arg("-mgeneral-regs-only") // a program's vector registers and floating-point state are its own
        .args(["-fasynchronous-unwind-tables", "-fexceptions"]) // stacks are unwound and exceptions thrown through it
        .args(match &*target_arch()? {
            // Control-flow protection, or a process would lose it for all of its code.
            "x86_64" => &["-fcf-protection=full"][..],
            // The same; and atomics in place, not by calls of the compiler's library.
            _ => &["-mbranch-protection=standard", "-mno-outline-atomics"][..],
        })
        .args(["-shared", "-nostdlib", "-Wl,-z,defs", "-Wl,-Bsymbolic", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"])
        .args(["-Wl,--build-id=sha1", "-Wl,--eh-frame-hdr", &format!("-Wl,-soname,{name}")])
        .args(sources)
        .args(more)
        .arg("-o")
        .arg(&out)
        .status()
        .context("cannot run the C compiler: `make deps` installs what the build needs")?;
    ensure!(status.success(), "cannot compile {SAMPLER} to {name}");
    Ok(())
}

/// Links the scratch program to `OUT_DIR/scratch`: it needs a C library by name, and no symbol of it, so that any build will do.
fn link_scratch() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let compiler = cc::Build::new()
        .no_default_flags(true)
        .try_get_compiler()
        .context("no C compiler was found: `make deps` installs what the build needs")?;
    let link = |arguments: &[&str], source: &str, name: &str| -> Result<()> {
        let mut command = compiler.to_command();
        command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-nostdlib"]).args(arguments).arg("-o").arg(out.join(name));
        let status = command.arg(source).status().context("cannot run the C compiler: `make deps` installs what the build needs")?;
        ensure!(status.success(), "cannot compile {source} to {name}");
        Ok(())
    };
    // Replaces the C library while the program is linked; only its name is used.
    let stub = out.join("libc_name.so");
    link(&["-shared", "-Wl,-soname,libc.so.6", "-x", "c"], "/dev/null", "libc_name.so")?;
    let stub = stub.to_str().context("OUT_DIR is not UTF-8")?;
    link(&["-fPIE", "-pie", "-Wl,--no-as-needed", stub, "-Wl,-z,noexecstack", "-Wl,--build-id=none"], SCRATCH, "scratch")
}

/// Links the player to `OUT_DIR/player`: it uses functions of the C library without their versions, so that it runs under any glibc.
fn link_player() -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?);
    let compiler = cc::Build::new()
        .no_default_flags(true)
        .try_get_compiler()
        .context("no C compiler was found: `make deps` installs what the build needs")?;
    let [player, _, stubs] = PLAYER;
    let link = |arguments: &[&str], source: &str, name: &str| -> Result<()> {
        let mut command = compiler.to_command();
        // The flags do not depend on the profile: the player is measured, not debugged.
        command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-ffreestanding", "-fno-stack-protector", "-nostdlib"]);
        let status = command.args(["-Wl,--build-id=none", source]).args(arguments).arg("-o").arg(out.join(name)).status();
        let status = status.context("cannot run the C compiler: `make deps` installs what the build needs")?;
        ensure!(status.success(), "cannot compile {source} to {name}");
        Ok(())
    };
    link(&["-fPIC", "-shared", "-Wl,-soname,libc.so.6"], stubs, "libc_names.so")?;
    link(&["-fPIC", "-shared", "-DTHREADS", "-Wl,-soname,libpthread.so.0"], stubs, "libpthread_names.so")?;
    let names = [out.join("libc_names.so"), out.join("libpthread_names.so")];
    let [libc, threads] = names.each_ref().map(|name| name.to_str().context("OUT_DIR is not UTF-8"));
    link(&["-fPIE", "-pie", "-Wl,-E", "-Wl,--no-as-needed", libc?, threads?, "-Wl,-z,noexecstack"], player, "player")
}

/// Compiles `bpf/SOURCE.bpf.c` to `OUT_DIR/NAME.bpf.o`.
fn compile(source: &str, name: &str, defines: &[&str]) -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").context("OUT_DIR is not set")?).join(format!("{name}.bpf.o"));
    let source = format!("bpf/{source}.bpf.c");
    let arch = target_arch()?;
    // Debian and Ubuntu keep asm/ in the architecture's folder, where a compiler for the BPF target does not look; packages for cross
    // compilers have a folder of their own.
    let asm = [format!("-idirafter/usr/include/{arch}-linux-gnu"), format!("-idirafter/usr/{arch}-linux-gnu/include")];
    // The verifier's log names the line of each instruction; the absolute path of the sources would be private, and would make two builds
    // differ.
    let here = env::current_dir().context("no current folder")?;
    let elsewhere = format!("-ffile-prefix-map={}=/fragprof", here.display());
    let mut builder = SkeletonBuilder::new();
    let mut flags = vec![
        BPF_CPU,
        &asm[0],
        &asm[1],
        &elsewhere,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",                   // BPF_PROG's hidden context
        "-Wno-gnu-variable-sized-type-not-at-end", // a record's header followed by its frames
    ];
    flags.extend(defines);
    builder.source(&source).obj(&out).clang_args(flags);
    builder
        .build()
        .with_context(|| format!("cannot compile {source}: is clang (>= 12) installed? `make deps` installs what the build needs"))
}
