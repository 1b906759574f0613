//! The memory of a dead process: an ELF core file.
//!
//! The kernel writes one PT_LOAD per mapping and omits pages that were not present, as holes or zeros; so a page of zeros counts as not present
//! here, whether the file is sparse or not. NT_FILE gives the files' names, NT_PRPSINFO the process.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::memory::{Memory, MemoryError, is_user_address, word_at, word16_at, word32_at};
use super::threads::{THREADS_MAX, ThreadState};
use crate::heap::residency::{PageRun, PageRuns, PageState, page_bytes, page_down, page_up};
use crate::machine::Machine;
use crate::process::maps::{Device, Permissions};
use crate::process::{Backing, Mapping, Maps};
use crate::units::{Addr, FileOffset, HumanBytes};

/// Notes read at most: NT_FILE of a process with 65,530 mappings takes 8 MiB; threads' registers 1 KiB each.
const NOTES_BYTES_MAX: u64 = 64 << 20;
/// Segments read at most; vm.max_map_count is 65,530, and databases raise it to 262,144.
const SEGMENTS_MAX: usize = 1 << 20;
/// Bytes scanned at once for pages of zeros.
const SCAN_BYTES: usize = 1 << 20;

const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;
const PF_X: u32 = 1;
const PF_W: u32 = 2;
const PF_R: u32 = 4;
const NT_PRSTATUS: u32 = 1;
const NT_PRPSINFO: u32 = 3;
const NT_AUXV: u32 = 6;
const NT_FILE: u32 = 0x4649_4c45;
/// Key of the page size in the auxiliary vector.
const AT_PAGESZ: u64 = 6;
/// e_phnum's value when the number of segments is in the first section header's sh_info.
const PN_XNUM: u16 = 0xffff;

#[derive(Debug, Clone, Copy)]
struct Segment {
    start: u64,
    end: u64,
    offset: u64,
    file_bytes: u64,
    flags: u32,
}

/// An ELF core file.
#[derive(Debug)]
pub struct CoreFile {
    file: File,
    path: String,
    segments: Vec<Segment>,
    maps: Maps,
    pid: u32,
    comm: String,
    threads: Vec<ThreadState>,
    /// Of the machine that it is of; 0 if it does not say.
    page_bytes: u64,
}

impl CoreFile {
    /// Opens a core file and reads its headers.
    ///
    /// # Errors
    /// If it is not an ELF core file of x86-64 or arm64, or of a machine with pages of another size.
    pub fn open(path: &Path) -> Result<Self, MemoryError> {
        let name = path.display().to_string();
        let wrong = |reason: &str| MemoryError::Core { path: name.clone(), reason: reason.to_owned() };
        let file = File::open(path).map_err(|error| wrong(&error.to_string()))?;
        let mut header = [0u8; 64];
        file.read_exact_at(&mut header, 0).map_err(|_| wrong("it is shorter than an ELF header"))?;
        if header.get(..4) != Some(b"\x7fELF") {
            return Err(wrong("it is not an ELF file"));
        }
        let (kind, machine) = (word16_at(&header, 16), word16_at(&header, 18));
        let machine = Machine::from_elf(machine).filter(|_| header.get(4..6) == Some(&[2, 1]));
        let machine = machine.ok_or_else(|| wrong("it is not from an x86-64 or arm64 process"))?;
        if kind != 4 {
            return Err(wrong("it is an ELF file, but not a core"));
        }
        let (table, entry_bytes) = (word_at(&header, 32), u64::from(word16_at(&header, 54)));
        let mut count = u64::from(word16_at(&header, 56));
        if count == u64::from(PN_XNUM) {
            let mut section = [0u8; 64];
            file.read_exact_at(&mut section, word_at(&header, 40)).map_err(|_| wrong("its segment count cannot be read"))?;
            count = u64::from(word32_at(&section, 44));
        }
        if entry_bytes != 56 || count > SEGMENTS_MAX as u64 {
            return Err(wrong("its program headers are malformed"));
        }
        let mut headers = vec![0u8; usize::try_from(count * 56).unwrap_or(0)];
        file.read_exact_at(&mut headers, table).map_err(|_| wrong("its program headers are cut off"))?;
        let mut core = Self {
            file,
            path: name,
            segments: Vec::new(),
            maps: Maps::default(),
            pid: 0,
            comm: String::new(),
            threads: Vec::new(),
            page_bytes: 0,
        };
        let mut named: Vec<(Range<u64>, u64, String)> = Vec::new();
        for header in headers.chunks_exact(56) {
            let segment = Segment {
                offset: word_at(header, 8),
                start: word_at(header, 16),
                file_bytes: word_at(header, 32),
                end: word_at(header, 16).saturating_add(word_at(header, 40)),
                flags: word32_at(header, 4),
            };
            match word32_at(header, 0) {
                PT_LOAD if is_user_address(segment.start) && segment.end > segment.start => core.segments.push(segment),
                PT_NOTE => core.read_notes(machine, &segment, &mut named),
                _ => {}
            }
        }
        core.segments.sort_by_key(|segment| segment.start);
        core.maps.mappings = core.segments.iter().map(|segment| mapping(segment, &named)).collect();
        if core.segments.is_empty() {
            return Err(MemoryError::Core { path: core.path, reason: "it contains no memory".into() });
        }
        // Residency, and what is trimmable and pinned, are of whole pages.
        if core.page_bytes != 0 && core.page_bytes != page_bytes() {
            let reason = format!(
                "it is of a machine with pages of {}, and this one has pages of {}: read it on one with such pages",
                HumanBytes(core.page_bytes),
                HumanBytes(page_bytes())
            );
            return Err(MemoryError::Core { path: core.path, reason });
        }
        Ok(core)
    }

    /// The process's id; 0 if it is not in the core.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The process's name; empty if it is not in the core.
    #[must_use]
    pub fn comm(&self) -> &str {
        &self.comm
    }

    fn read_notes(&mut self, machine: Machine, segment: &Segment, named: &mut Vec<(Range<u64>, u64, String)>) {
        let mut notes = vec![0u8; usize::try_from(segment.file_bytes.min(NOTES_BYTES_MAX)).unwrap_or(0)];
        let got = read_some(&self.file, segment.offset, &mut notes);
        notes.truncate(got);
        let mut at = 0usize;
        while at.saturating_add(12) <= notes.len() {
            let (name_bytes, content_bytes, kind) = (word32_at(&notes, at), word32_at(&notes, at + 4), word32_at(&notes, at + 8));
            let content_at = at.saturating_add(12).saturating_add((name_bytes as usize).next_multiple_of(4));
            let content_end = content_at.saturating_add(content_bytes as usize);
            let Some(content) = notes.get(content_at..content_end) else { break };
            match kind {
                NT_PRPSINFO => {
                    // struct elf_prpsinfo: pid at 24, pr_fname[16] at 40.
                    self.pid = word32_at(content, 24);
                    let name = content.get(40..56).unwrap_or_default();
                    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
                    self.comm = String::from_utf8_lossy(name.get(..end).unwrap_or_default()).into_owned();
                }
                NT_PRSTATUS if self.threads.len() < THREADS_MAX => self.threads.push(thread(machine, content)),
                NT_FILE => read_files(content, named),
                NT_AUXV => {
                    let mut entries = content.chunks_exact(16).map(|entry| (word_at(entry, 0), word_at(entry, 8)));
                    self.page_bytes = entries.find(|&(key, _)| key == AT_PAGESZ).map_or(0, |(_, value)| value);
                }
                _ => {}
            }
            at = content_end.next_multiple_of(4);
        }
    }

    fn segment_at(&self, addr: u64) -> Option<&Segment> {
        let after = self.segments.partition_point(|segment| segment.start <= addr);
        self.segments.get(after.checked_sub(1)?).filter(|segment| addr < segment.end)
    }
}

/// struct elf_prstatus: pr_pid at 32, pr_reg at 112. That is of x86-64 r15 to rdi, orig_rax, rip, cs, eflags, rsp; of arm64 x0 to x30, sp,
/// pc, pstate (struct user_pt_regs).
fn thread(machine: Machine, content: &[u8]) -> ThreadState {
    let register = |number: usize| word_at(content, 112 + 8 * number);
    let (general, stack_pointer) = match machine {
        Machine::X86_64 => (0..15, 19),
        Machine::Aarch64 => (0..31, 31),
    };
    let general = general.map(register).filter(|&word| is_user_address(word)).collect();
    let stack_pointer = Some(register(stack_pointer)).filter(|&word| is_user_address(word));
    ThreadState { tid: word32_at(content, 32), comm: String::new(), stack_pointer, program_counter: None, registers: general }
}

/// NT_FILE: count, page size, then start, end and offset in pages of each mapping, then the names.
fn read_files(content: &[u8], named: &mut Vec<(Range<u64>, u64, String)>) {
    let (count, page_bytes) = (usize::try_from(word_at(content, 0)).unwrap_or(usize::MAX), word_at(content, 8));
    let Some(names_at) = count.checked_mul(24).and_then(|bytes| bytes.checked_add(16)).filter(|&at| at <= content.len()) else { return };
    let mut names = content.get(names_at..).unwrap_or_default().split(|&byte| byte == 0);
    for index in 0..count {
        let at = 16 + 24 * index;
        let Some(name) = names.next() else { return };
        let offset = word_at(content, at + 16).saturating_mul(page_bytes);
        named.push((word_at(content, at)..word_at(content, at + 8), offset, String::from_utf8_lossy(name).into_owned()));
    }
    named.sort_by_key(|(range, ..)| range.start);
}

fn mapping(segment: &Segment, named: &[(Range<u64>, u64, String)]) -> Mapping {
    let after = named.partition_point(|(range, ..)| range.start <= segment.start);
    let file = after.checked_sub(1).and_then(|index| named.get(index)).filter(|(range, ..)| range.contains(&segment.start));
    let (backing, offset, inode) = match file {
        Some((range, offset, name)) => {
            // A number that is the same for all mappings of one file, as an inode would be.
            let inode = named.iter().position(|(.., other)| other == name).unwrap_or(0) as u64 + 1;
            let (path, deleted) = name.strip_suffix(" (deleted)").map_or((name.as_str(), false), |path| (path, true));
            (Backing::File { path: path.into(), deleted }, offset.saturating_add(segment.start - range.start), inode)
        }
        None => (Backing::Anonymous, 0, 0),
    };
    let has = |flag| segment.flags & flag != 0;
    Mapping {
        start: Addr(segment.start),
        end: Addr(segment.end),
        offset: FileOffset(offset),
        permissions: Permissions { read: has(PF_R), write: has(PF_W), execute: has(PF_X), shared: false },
        device: Device::default(),
        inode,
        backing,
    }
}

/// Reads what is there; a truncated core ends early.
fn read_some(file: &File, offset: u64, out: &mut [u8]) -> usize {
    let mut done = 0usize;
    while let Some(rest) = out.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(0) | Err(_) => break,
            Ok(got) => done += got,
        }
    }
    done
}

impl Memory for CoreFile {
    fn read(&self, addr: u64, out: &mut [u8]) -> usize {
        let mut done = 0usize;
        while done < out.len() {
            let at = addr.wrapping_add(done as u64);
            let Some(segment) = self.segment_at(at) else { break };
            let inside = at - segment.start;
            let available = segment.file_bytes.saturating_sub(inside);
            let wanted = usize::try_from(available).unwrap_or(usize::MAX).min(out.len() - done);
            let Some(part) = out.get_mut(done..done + wanted).filter(|part| !part.is_empty()) else { break };
            let got = read_some(&self.file, segment.offset.saturating_add(inside), part);
            done += got;
            if got < wanted {
                break;
            }
        }
        done
    }

    fn maps(&self) -> Result<Maps, MemoryError> {
        Ok(self.maps.clone())
    }

    fn threads(&self) -> Vec<ThreadState> {
        self.threads.clone()
    }

    fn page_runs(&self, range: Range<u64>) -> Result<PageRuns, MemoryError> {
        let mut runs = PageRuns::default();
        let range = page_down(range.start)..page_up(range.end);
        let mut buffer = vec![0u8; SCAN_BYTES];
        let first = self.segments.partition_point(|segment| segment.end <= range.start);
        for segment in self.segments.get(first..).unwrap_or_default().iter().take_while(|segment| segment.start < range.end) {
            let end = segment.end.min(segment.start.saturating_add(segment.file_bytes)).min(range.end);
            let mut at = segment.start.max(range.start);
            while at < end {
                let wanted = usize::try_from(end - at).unwrap_or(SCAN_BYTES).min(SCAN_BYTES);
                let Some(part) = buffer.get_mut(..wanted) else { break };
                let got = self.read(at, part);
                if got == 0 {
                    break;
                }
                for page in part.get(..got).unwrap_or_default().chunks(page_bytes() as usize) {
                    if page.iter().any(|&byte| byte != 0) {
                        let state = PageState { present: true, ..PageState::default() };
                        runs.push(PageRun { start: at, end: at.saturating_add(page_bytes()), state });
                    }
                    at = at.saturating_add(page_bytes());
                }
            }
        }
        Ok(runs)
    }
}
