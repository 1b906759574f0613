//! Recordings of real stacks: a process is stopped at random moments, and the registers and stack bytes of a thread are copied.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use fragprof::bpf::MappingKind;
use fragprof::machine::Machine;
use fragprof::process::{Backing, Maps};
use fragprof::unwind::Table;
use fragprof::unwind::elf::Elf;
use fragprof::unwind::mappings::{self, CodeMapping};

use super::host::PtRegs;

/// A stopped thread.
#[derive(Debug, Clone)]
pub struct Recording {
    /// The kind of its registers.
    pub machine: Machine,
    /// Its registers.
    pub regs: PtRegs,
    /// Its stack, and the main stack: address and bytes.
    pub regions: Vec<(u64, Vec<u8>)>,
}

impl Recording {
    /// The program counter.
    pub fn pc(&self) -> u64 {
        self.regs.words[if self.machine == Machine::X86_64 { 16 } else { 32 }]
    }

    /// The stack pointer.
    pub fn sp(&self) -> u64 {
        self.regs.words[if self.machine == Machine::X86_64 { 19 } else { 31 }]
    }

    /// A register by its DWARF number: up to 16 on x86-64 (which is rip), up to 31 on arm64.
    pub fn register(&self, number: usize) -> u64 {
        if self.machine == Machine::Aarch64 {
            return self.regs.words[number];
        }
        // rax rdx rcx rbx rsi rdi rbp rsp r8..r15 rip
        const AT: [usize; 17] = [10, 12, 11, 5, 13, 14, 4, 19, 9, 8, 7, 6, 3, 2, 1, 0, 16];
        self.regs.words[AT[number]]
    }

    /// A word of the recorded memory.
    pub fn word(&self, address: u64) -> Option<u64> {
        self.regions.iter().find_map(|(begin, bytes)| {
            let at = usize::try_from(address.checked_sub(*begin)?).ok()?;
            Some(u64::from_le_bytes(bytes.get(at..)?.get(..8)?.try_into().unwrap()))
        })
    }
}

/// A file whose code a process runs.
#[derive(Debug, Clone)]
pub struct CodeFile {
    /// Its path.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: Arc<Vec<u8>>,
    /// Its executable mappings: first address, end, file offset.
    pub mapped: Vec<(u64, u64, u64)>,
}

/// A process's code, in the form of fragprof's pipeline and in that of the oracles.
pub struct World {
    /// Files.
    pub files: Vec<CodeFile>,
    /// fragprof's tables, by file.
    pub tables: Vec<Vec<u64>>,
    /// fragprof's mapping table.
    pub mappings: Vec<u64>,
    /// Executable memory.
    pub texts: Vec<(u64, Vec<u8>)>,
}

/// Bytes as words.
pub fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
}

impl World {
    /// Reads a process's mappings.
    pub fn of(pid: u32) -> Self {
        let maps = Maps::parse(&fs::read(format!("/proc/{pid}/maps")).unwrap());
        let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
        let mut files: Vec<CodeFile> = Vec::new();
        let mut by_path: HashMap<PathBuf, usize> = HashMap::new();
        let mut tables = Vec::new();
        let mut code = Vec::new();
        let mut texts = Vec::new();
        for mapping in maps.mappings.iter().filter(|m| m.permissions.execute && m.start.0 < 1 << 47) {
            let mut text = vec![0; mapping.len() as usize];
            if memory.read_exact_at(&mut text, mapping.start.0).is_ok() {
                texts.push((mapping.start.0, text.clone()));
            }
            let (begin, end, offset) = (mapping.start.0, mapping.end.0, mapping.offset.0);
            let (path, bytes) = match &mapping.backing {
                Backing::File { path, .. } => {
                    (path.clone(), fs::read(format!("/proc/{pid}/map_files/{begin:x}-{end:x}")).unwrap_or_default())
                }
                Backing::Named(name) if name == "[vdso]" => (name.into(), text),
                Backing::Named(name) if name == "[uprobes]" => continue,
                _ => {
                    code.push(CodeMapping { begin, end, bias: 0, file: 0, kind: MappingKind::Jit });
                    continue;
                }
            };
            let file = *by_path.entry(path.clone()).or_insert_with(|| {
                tables.push(Table::read(bytes.as_slice()).map(|table| words(&table.to_bytes())).unwrap_or_default());
                files.push(CodeFile { path, bytes: Arc::new(bytes), mapped: Vec::new() });
                files.len() - 1
            });
            files[file].mapped.push((begin, end, offset));
            let kind = if tables[file].is_empty() { MappingKind::NoCfi } else { MappingKind::File };
            let segments = Elf::parse(files[file].bytes.as_slice()).map(|elf| elf.segments).unwrap_or_default();
            let bias = mappings::bias_of(&segments, begin, offset).unwrap_or(0);
            code.push(CodeMapping { begin, end, bias, file: file as u32, kind });
        }
        Self { files, tables, mappings: words(&mappings::to_blocks(&code, None, None).0), texts }
    }

    /// Addresses as file and offset, one per line.
    pub fn describe(&self, addresses: &[u64]) -> String {
        let place = |address: u64| {
            self.files.iter().find_map(|file| {
                let (begin, _, offset) = file.mapped.iter().find(|mapped| mapped.0 <= address && address < mapped.1)?;
                Some(format!("{} + {:#x}", file.path.display(), address - begin + offset))
            })
        };
        addresses.iter().map(|&address| format!("    {address:#x} {}\n", place(address).unwrap_or_default())).collect()
    }
}

/// Threads of a process.
fn threads(pid: u32) -> Vec<i32> {
    fs::read_dir(format!("/proc/{pid}/task"))
        .map(|entries| entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect())
        .unwrap_or_default()
}

fn ptrace(request: libc::c_uint, tid: i32, data: usize) -> bool {
    // SAFETY: the requests used here take no address and either no data or a pointer that the caller made from a reference.
    unsafe { libc::ptrace(request, tid, 0, data) != -1 }
}

/// Stops one thread, copies the input of unwinding, and resumes it. `None` if the thread has ended.
pub fn record(pid: u32, tid: i32) -> Option<Recording> {
    if !ptrace(libc::PTRACE_SEIZE, tid, 0) {
        return None;
    }
    let mut status = 0;
    let stopped = ptrace(libc::PTRACE_INTERRUPT, tid, 0)
        // SAFETY: status is a valid local.
        && unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) } == tid
        && libc::WIFSTOPPED(status);
    let recording = stopped.then(|| copy(pid, tid)).flatten();
    // A signal that arrived at that moment is delivered to the program.
    let signal = if libc::WIFSTOPPED(status) && status >> 16 == 0 { libc::WSTOPSIG(status) as usize } else { 0 };
    ptrace(libc::PTRACE_DETACH, tid, signal);
    recording
}

/// The request of x86-64; libc does not define it for other machines.
const PTRACE_GETREGS: libc::c_uint = 12;

fn copy(pid: u32, tid: i32) -> Option<Recording> {
    let mut regs = PtRegs::default();
    let mut all = [0u64; 27]; // struct user_regs_struct: pt_regs, then segment bases and selectors
    if !ptrace(PTRACE_GETREGS, tid, all.as_mut_ptr() as usize) {
        return None;
    }
    regs.words[..21].copy_from_slice(&all[..21]);
    let mut recording = Recording { machine: Machine::X86_64, regs, regions: Vec::new() };
    let maps = Maps::parse(&fs::read(format!("/proc/{pid}/maps")).ok()?);
    let memory = fs::File::open(format!("/proc/{pid}/mem")).ok()?;
    let sp = recording.sp();
    for mapping in &maps.mappings {
        let is_main = matches!(&mapping.backing, Backing::Named(name) if name == "[stack]");
        let holds_sp = mapping.start.0 <= sp && sp < mapping.end.0;
        if !is_main && !holds_sp {
            continue;
        }
        // From the red zone up; a stack of another thread is copied completely, within limits.
        let begin = if holds_sp { mapping.start.0.max(sp.saturating_sub(4096)) } else { mapping.start.0 };
        let mut bytes = vec![0; (mapping.end.0 - begin).min(4 << 20) as usize];
        memory.read_exact_at(&mut bytes, begin).ok()?;
        recording.regions.push((begin, bytes));
    }
    Some(recording)
}

/// Records a process's threads in turn, until there are `count` recordings or the process ends.
pub fn record_many(pid: u32, count: usize) -> Vec<Recording> {
    let mut recordings = Vec::new();
    let mut turn = 0usize;
    let mut failures = 0;
    while recordings.len() < count && failures < 100 {
        let tids = threads(pid);
        let Some(&tid) = tids.get(turn % tids.len().max(1)) else { break };
        match record(pid, tid) {
            Some(recording) => recordings.push(recording),
            None => failures += 1,
        }
        turn += 1;
        // To get another moment of the program; there is no condition to wait for.
        std::thread::sleep(std::time::Duration::from_micros(500 + 137 * (turn as u64 % 11)));
    }
    recordings
}
