//! The unwinder's C code on the host, over recorded memory and tables built by fragprof's own pipeline.

use std::ffi::{CString, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::process::Command;

use fragprof::bpf::{PYTHON_FRAMES_MAX, PythonFrame};
use fragprof::machine::Machine;
use fragprof::unwind::End;
use tempfile::TempDir;

use super::lab::{Stack, root, run};
use super::recording::{Recording, World};

/// The kernel's `struct pt_regs` of either machine.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PtRegs {
    /// x86-64: r15 to ss in the kernel's order. arm64: x0 to x30, sp, pc, pstate, then x0 at a system call and its number.
    pub words: [u64; 36],
}

impl Default for PtRegs {
    fn default() -> Self {
        Self { words: [0; 36] }
    }
}

#[repr(C)]
struct HostRegion {
    begin: u64,
    length: u64,
    bytes: *const u8,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct HostBlocks {
    blocks: *const u8,
    length: u64,
}

#[repr(C)]
struct HostWorld {
    regions: *const HostRegion,
    region_count: u64,
    tables: *const HostBlocks,
    table_count: u64,
    mappings: HostBlocks,
    generation: u32,
}

#[repr(C)]
struct HostStack {
    hash: u64,
    need_pc: u64,
    len: u32,
    end: u32,
    repeated: u32,
    pad: u32,
    frames: [u64; 128],
}

#[repr(C)]
struct HostPython {
    hash: u64,
    len: u32,
    end: u32,
    frames: [PythonFrame; PYTHON_FRAMES_MAX as usize],
}

type ReadPython = unsafe extern "C" fn(*const HostWorld, *mut u64, *mut u64, u64, *mut HostPython);
type Unwind = unsafe extern "C" fn(*const HostWorld, *mut u64, *mut PtRegs, *mut HostStack);

/// The shared object, loaded.
pub struct Host {
    unwind: Unwind,
    python: ReadPython,
    state_bytes: usize,
    python_bytes: usize,
    _directory: TempDir,
}

/// A thread's state, which the kernel keeps in task storage.
pub struct Thread {
    walk: Vec<u64>,
    python: Vec<u64>,
}

/// The Python frames of a thread.
#[derive(Debug, PartialEq, Eq)]
pub struct Python {
    /// Of the native frames and these.
    pub hash: u64,
    /// `enum fp_python_end`.
    pub end: u32,
    /// Innermost first.
    pub frames: Vec<PythonFrame>,
}

impl Host {
    /// Compiles it for stacks of a machine, and loads it.
    pub fn new(machine: Machine) -> Self {
        let define = match machine {
            Machine::X86_64 => "-D__TARGET_ARCH_x86",
            Machine::Aarch64 => "-D__TARGET_ARCH_arm64",
        };
        let directory = TempDir::new().unwrap();
        let out = directory.path().join("unwind_host.so");
        let mut clang = Command::new("clang");
        clang.args(["-shared", "-fPIC", "-O2", "-g", "-fsanitize=undefined,bounds", "-fsanitize-trap=all", "-Wall", define]);
        clang.args(["-Wno-gnu-variable-sized-type-not-at-end", "-Wno-pass-failed"]);
        run(clang.arg(root().join("tests/unwind/host.c")).arg("-o").arg(&out));
        let path = CString::new(out.as_os_str().as_bytes()).unwrap();
        // SAFETY: a path that ends with 0; the object has no constructors.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        let symbol = |name: &std::ffi::CStr| {
            // SAFETY: the handle is never closed.
            let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!address.is_null(), "{name:?}");
            address
        };
        // SAFETY: the signature in host.c.
        let python_bytes = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(symbol(c"host_python_bytes"))() };
        // SAFETY: the signature in host.c, with the structs mirrored above.
        let python = unsafe { std::mem::transmute::<*mut c_void, ReadPython>(symbol(c"host_python")) };
        // SAFETY: the signature in host.c.
        let state_bytes = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u64>(symbol(c"host_state_bytes"))() };
        // SAFETY: the signature in host.c, with the structs mirrored above.
        let unwind = unsafe { std::mem::transmute::<*mut c_void, Unwind>(symbol(c"host_unwind")) };
        Self { unwind, python, state_bytes: state_bytes as usize, python_bytes: python_bytes as usize, _directory: directory }
    }

    /// State of a thread that was never walked.
    pub fn thread(&self) -> Thread {
        Thread { walk: vec![0; self.state_bytes.div_ceil(8)], python: vec![0; self.python_bytes.div_ceil(8)] }
    }

    /// Walks a recorded stack. Also returns how many of its steps were repeated from the thread's last walk.
    pub fn unwind(&self, thread: &mut Thread, world: &World, recording: &Recording) -> (Stack, u32) {
        let mut regs = recording.regs;
        let mut out = HostStack { hash: 0, need_pc: 0, len: 0, end: 0, repeated: 0, pad: 0, frames: [0; 128] };
        seen(world, recording, |seen| {
            // SAFETY: all pointers are to live memory of the lengths given, and the state is as long as the object requested.
            unsafe { (self.unwind)(seen, thread.walk.as_mut_ptr(), &raw mut regs, &raw mut out) };
        });
        let frames = out.frames[..out.len as usize].to_vec();
        (Stack { hash: out.hash, walks: 0, end: End::from_wire(out.end as u8).unwrap(), frames }, out.repeated)
    }

    /// Reads the Python frames of the thread that was walked last. `own`: the thread's own pointer.
    pub fn python(&self, thread: &mut Thread, world: &World, recording: &Recording, own: u64) -> Python {
        let none = PythonFrame { code: 0, instruction: 0, native: 0, flags: 0 };
        let mut out = HostPython { hash: 0, len: 0, end: 0, frames: [none; PYTHON_FRAMES_MAX as usize] };
        seen(world, recording, |seen| {
            // SAFETY: as above.
            unsafe { (self.python)(seen, thread.walk.as_mut_ptr(), thread.python.as_mut_ptr(), own, &raw mut out) };
        });
        Python { hash: out.hash, end: out.end, frames: out.frames[..out.len as usize].to_vec() }
    }
}

/// Passes what the helpers of the object see.
fn seen(world: &World, recording: &Recording, walk: impl FnOnce(*const HostWorld)) {
    let regions: Vec<HostRegion> = recording
        .regions
        .iter()
        .chain(&world.texts)
        .map(|(begin, bytes)| HostRegion { begin: *begin, length: bytes.len() as u64, bytes: bytes.as_ptr() })
        .collect();
    let blocks = |bytes: &Vec<u64>| HostBlocks { blocks: bytes.as_ptr().cast(), length: bytes.len() as u64 / 32 };
    let tables: Vec<HostBlocks> = world.tables.iter().map(blocks).collect();
    let seen = HostWorld {
        regions: regions.as_ptr(),
        region_count: regions.len() as u64,
        tables: tables.as_ptr(),
        table_count: tables.len() as u64,
        mappings: blocks(&world.mappings),
        generation: 1,
    };
    walk(&raw const seen);
}
