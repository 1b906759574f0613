//! The frames on the stacks of waiting threads, unwound with the files' tables from copies of their words. No frame is guessed: if one does
//! not match the tables, the walk ends.

use std::collections::HashMap;
use std::fs::File;
use std::sync::Arc;

use super::file::MappedFile;
use super::{Mapping, Maps, Process};
use crate::bpf;
use crate::machine::Machine;
use crate::machine::user_space::code_address;
use crate::units::Addr;
use crate::unwind::Table;
use crate::unwind::elf::{Elf, Segment};
use crate::unwind::rule::{BP, SP};

/// Most frames of one thread. Long-lived locals are in the outer ones.
const FRAMES_MAX: usize = 256;
/// Most threads walked.
const THREADS_MAX: usize = 256;
/// Most files whose tables are read; each takes about ten milliseconds.
const FILES_MAX: usize = 64;

/// One frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    /// An address within the call instruction; of the innermost frame, the instruction pointer.
    pub pc: u64,
    /// The canonical frame address: above everything that is the frame's own.
    pub cfa: u64,
    /// The frame's lowest address.
    pub start: u64,
}

/// A thread's registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Instruction pointer.
    pub pc: u64,
    /// Stack pointer.
    pub sp: u64,
    /// Frame pointer; `None` if it is not known.
    pub bp: Option<u64>,
    /// The register with a call's return address; `None` if it is not known, or the machine has none.
    pub link: Option<u64>,
}

/// The unwind table of a file.
struct Unwound {
    table: Table,
    segments: Vec<Segment>,
}

/// One thread's stack.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Walk {
    /// The frames, innermost first.
    pub frames: Vec<Frame>,
    /// Whether the outermost function was reached, the one that the tables say nothing has called. The frames are then all there are.
    pub is_complete: bool,
}

/// Walks stacks of one process.
pub struct Walker<'a> {
    process: &'a Process,
    maps: &'a Maps,
    tables: HashMap<u64, Option<Arc<Unwound>>>,
}

impl<'a> Walker<'a> {
    /// For a process with these mappings.
    #[must_use]
    pub fn of(process: &'a Process, maps: &'a Maps) -> Self {
        Self { process, maps, tables: HashMap::new() }
    }

    /// Reads the tables of all files with code, so that no walk has to.
    pub fn read_tables(&mut self) {
        let maps = self.maps;
        for mapping in maps.executable_files() {
            self.table(mapping);
        }
    }

    /// The frames of some threads, by address. `word` reads the process's memory.
    pub fn frames(&mut self, threads: &[Standing], word: &dyn Fn(u64) -> Option<u64>) -> Vec<Frame> {
        let mut all: Vec<Frame> = threads.iter().take(THREADS_MAX).flat_map(|thread| self.walk(*thread, word).frames).collect();
        all.sort_by_key(|frame| frame.start);
        all
    }

    /// The frames of one thread. `word` reads the process's memory.
    pub fn walk(&mut self, thread: Standing, word: &dyn Fn(u64) -> Option<u64>) -> Walk {
        let mut walk = Walk::default();
        let link = Machine::HOST.rule_code(Machine::HOST.return_address());
        let (mut pc, mut sp, mut bp) = (thread.pc, thread.sp, thread.bp);
        for depth in 0..FRAMES_MAX {
            // A return address may be after its function's last byte.
            let at = if depth == 0 { pc } else { pc.wrapping_sub(1) };
            let Some(rule) = self.rule(at) else { break };
            let rule: bpf::Rule = zerocopy::transmute!(rule);
            let offset = u32::from_le_bytes(rule.offset);
            let register = match rule.registers & 15 {
                SP => Some(sp),
                BP => bp,
                _ => None,
            };
            let cfa = match (bpf::Cfa::from_wire(rule.cfa), register) {
                (Some(bpf::Cfa::Register), Some(register)) => register.checked_add_signed(i64::from(offset.cast_signed())),
                (Some(bpf::Cfa::Deref), Some(register)) => {
                    let (offset, add) = ((offset as u16).cast_signed(), ((offset >> 16) as u16).cast_signed());
                    word(register.wrapping_add_signed(i64::from(offset))).and_then(|word| word.checked_add_signed(i64::from(add)))
                }
                (Some(bpf::Cfa::End), _) => {
                    walk.frames.push(Frame { pc: at, cfa: sp, start: sp });
                    walk.is_complete = true;
                    break;
                }
                _ => None,
            };
            let saved_ra = bpf::SavedRa::from_wire(rule.saved >> 4);
            // Outer frames are at higher addresses; one whose return address is still in a register may have no words.
            let is_empty = |cfa: u64| cfa == sp && depth == 0 && saved_ra == Some(bpf::SavedRa::InRegister);
            let Some(cfa) = cfa.filter(|&cfa| (cfa > sp || is_empty(cfa)) && cfa % 8 == 0) else { break };
            walk.frames.push(Frame { pc: at, cfa, start: sp });
            let slot = i64::from(rule.bp_slot) * 8;
            let (saved_bp, bp_at) = match bpf::SavedBp::from_wire(rule.saved & 15) {
                Some(bpf::SavedBp::Same) => (bp, None),
                Some(bpf::SavedBp::AtCfa) => (None, Some(cfa.wrapping_add_signed(slot))),
                Some(bpf::SavedBp::AtBp) => (None, bp.map(|bp| bp.wrapping_add_signed(slot))),
                Some(bpf::SavedBp::AtSp) => (None, Some(sp.wrapping_add_signed(slot))),
                _ => (None, None),
            };
            bp = saved_bp.or_else(|| bp_at.and_then(word));
            let above = match saved_ra {
                Some(bpf::SavedRa::AtCfa) => word(cfa - 8),
                Some(bpf::SavedRa::InRegister) if depth == 0 && Some(rule.registers >> 4) == link => thread.link,
                Some(bpf::SavedRa::BesideBp) => bp_at.and_then(|at| word(at.wrapping_add(8))),
                Some(bpf::SavedRa::AtSlot) => word(cfa.wrapping_add_signed(slot)),
                Some(bpf::SavedRa::AtReg) => word(cfa.wrapping_sub_signed(i64::from(offset.cast_signed())).wrapping_add_signed(slot)),
                _ => None,
            };
            match above.map(code_address) {
                Some(above) if above != 0 => (pc, sp) = (above, cfa),
                _ => break,
            }
        }
        walk
    }

    /// The packed rule of an address.
    fn rule(&mut self, pc: u64) -> Option<u64> {
        let mapping = self.maps.find(Addr(pc)).filter(|mapping| mapping.permissions.execute)?;
        let table = self.table(mapping)?;
        let bias = crate::unwind::mappings::bias_of(&table.segments, mapping.start.0, mapping.offset.0)?;
        let rows = table.table.rows();
        let vaddr = pc.wrapping_sub(bias);
        let row = rows.rows.get(rows.rows.partition_point(|row| row.address <= vaddr).checked_sub(1)?)?;
        rows.rules.get(usize::from(row.rule)).copied().filter(|&rule| rule != 0)
    }

    fn table(&mut self, mapping: &Mapping) -> Option<Arc<Unwound>> {
        if self.tables.len() >= FILES_MAX && !self.tables.contains_key(&mapping.inode) {
            return None;
        }
        let process = self.process;
        let read = || {
            let path = MappedFile::open(process, mapping).ok()?.attach_path;
            let file = File::open(path).ok()?;
            let table = Table::read(&file).ok()?;
            let segments = Elf::parse(&file).ok()?.segments;
            Some(Arc::new(Unwound { table, segments }))
        };
        self.tables.entry(mapping.inode).or_insert_with(read).clone()
    }
}

/// Registers of waiting threads, from `/proc` for each, and from those that the kernel saved for all.
///
/// `saved` is a sequence of `struct pt_regs` of x86-64 (arch/x86/include/asm/ptrace.h): r15, r14, r13, r12, bp, bx, …, ip at 16, sp at 19.
/// A thread's registers are those with its stack and instruction pointers.
#[must_use]
pub fn standing(threads: &[(u64, u64)], saved: &[u64]) -> Vec<Standing> {
    const WORDS: usize = 21;
    const BASE: usize = 4;
    const IP: usize = 16;
    const STACK: usize = 19;
    let bp_of = |pc: u64, sp: u64| {
        let own = saved.chunks_exact(WORDS).find(|words| words.get(IP) == Some(&pc) && words.get(STACK) == Some(&sp));
        own.and_then(|words| words.get(BASE)).copied()
    };
    threads.iter().map(|&(pc, sp)| Standing { pc, sp, bp: bp_of(pc, sp), link: None }).collect()
}
