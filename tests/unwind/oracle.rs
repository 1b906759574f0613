//! Two other unwinders over the same recordings: gimli's rows, evaluated in full (every register, every expression), and framehop.

use std::collections::HashMap;

use fragprof::machine::Machine;
use framehop::x86_64::{CacheX86_64, UnwindRegsX86_64, UnwinderX86_64};
use framehop::{ExplicitModuleSectionInfo, Module, Unwinder as _};
use gimli::{
    BaseAddresses, CfaRule, CieOrFde, EhFrame, EhFrameOffset, Encoding, EndianSlice, EvaluationResult, Format, LittleEndian, Location,
    Register, RegisterRule, UnwindContext, UnwindExpression, UnwindSection as _, Value,
};
use object::{Object as _, ObjectSection as _, ObjectSegment as _, SegmentFlags};

use super::recording::{CodeFile, Recording, World};

type Slice<'a> = EndianSlice<'a, LittleEndian>;

/// How far an oracle got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reached {
    /// The outermost frame: its return address is undefined.
    Entry,
    /// A pc for which the file has no row, or that is in no file.
    NoRow,
    /// The requested number of frames.
    Limit,
    /// Memory that was not recorded, or an expression that failed.
    Stuck,
}

struct File {
    mapped: Vec<(u64, u64)>,
    bias: u64,
    eh_frame: Vec<u8>,
    address: u64,
    functions: Vec<(u64, u64, usize)>,
}

/// gimli's rows evaluated in full.
pub struct Gimli {
    files: Vec<File>,
}

/// Columns of the rows that are evaluated: general-purpose registers and the return address, on either machine.
const COLUMNS: usize = 33;

fn section_of(bytes: &[u8], machine: Machine) -> EhFrame<Slice<'_>> {
    let mut section = EhFrame::new(bytes, LittleEndian);
    if machine == Machine::Aarch64 {
        section.set_vendor(gimli::Vendor::AArch64);
    }
    section
}

/// The file's `.eh_frame` and its address, through the object crate; without section headers through `.eh_frame_hdr`.
fn eh_frame(file: &CodeFile) -> Option<(Vec<u8>, u64, u64)> {
    let object = object::File::parse(file.bytes.as_slice()).ok()?;
    let (begin, _, offset) = *file.mapped.first()?;
    let segment = object.segments().find(|segment| {
        let (from, bytes) = segment.file_range();
        // The first page of the text may also contain the end of the previous segment.
        let executable = matches!(segment.flags(), SegmentFlags::Elf { p_flags, .. } if p_flags.0 & object::elf::PF_X.0 != 0);
        executable && from & !4095 <= offset && offset < from + bytes
    })?;
    let bias = begin.wrapping_sub(segment.address().wrapping_add(offset.wrapping_sub(segment.file_range().0)));
    if let Some(section) = object.section_by_name(".eh_frame") {
        return Some((section.data().ok()?.to_vec(), section.address(), bias));
    }
    // The header's first field after four bytes of encodings is, in every linker's output, a 32-bit distance from itself.
    let bytes = &file.bytes;
    let table = u64::from_le_bytes(bytes[32..40].try_into().unwrap()) as usize;
    let headers = bytes[table..].chunks_exact(56).take(u16::from_le_bytes(bytes[56..58].try_into().unwrap()).into());
    let header = headers.into_iter().find(|header| u32::from_le_bytes(header[..4].try_into().unwrap()) == 0x6474_e550)?;
    let (at, hdr_address) =
        (u64::from_le_bytes(header[8..16].try_into().unwrap()) as usize, u64::from_le_bytes(header[16..24].try_into().unwrap()));
    assert_eq!(bytes[at + 1], 0x1b);
    let distance = i32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap());
    let address = hdr_address.wrapping_add(4).wrapping_add_signed(distance.into());
    let segment = object.segments().find(|segment| segment.address() <= address && address < segment.address() + segment.size())?;
    let data = segment.data().ok()?;
    Some((data[(address - segment.address()) as usize..].to_vec(), address, bias))
}

impl Gimli {
    /// Indexes the files' functions.
    pub fn new(world: &World) -> Self {
        let files = world.files.iter().filter_map(|file| {
            let (bytes, address, bias) = eh_frame(file)?;
            let mut functions = Vec::new();
            let section = EhFrame::new(&bytes, LittleEndian);
            let bases = BaseAddresses::default().set_eh_frame(address);
            let mut entries = section.entries(&bases);
            while let Ok(Some(entry)) = entries.next() {
                if let CieOrFde::Fde(partial) = entry {
                    let fde = partial.parse(EhFrame::cie_from_offset).unwrap();
                    functions.push((fde.initial_address(), fde.initial_address() + fde.len(), fde.offset()));
                }
            }
            functions.sort_unstable();
            let mapped = file.mapped.iter().map(|&(begin, end, _)| (begin, end)).collect();
            Some(File { mapped, bias, eh_frame: bytes, address, functions })
        });
        Self { files: files.collect() }
    }

    /// Frames (addresses), leaf first, and how far it got.
    pub fn unwind(&self, recording: &Recording, limit: usize) -> (Vec<u64>, Reached) {
        let machine = recording.machine;
        let (sp, ra) = (usize::from(machine.stack_pointer()), usize::from(machine.return_address()));
        let known = if machine == Machine::X86_64 { 17 } else { 32 };
        let mut registers: [Option<u64>; COLUMNS] = std::array::from_fn(|i| (i < known).then(|| recording.register(i)));
        let mut pc = Some(recording.pc());
        let mut frames = Vec::new();
        let mut exact = true;
        let mut context = UnwindContext::new();
        loop {
            let Some(at_pc) = pc else { return (frames, Reached::Entry) };
            // arm64: without the signature.
            let this = if machine == Machine::X86_64 { at_pc } else { at_pc & 0xffff_ffff_ffff };
            if frames.len() == limit {
                return (frames, Reached::Limit);
            }
            frames.push(this);
            let Some(file) = self.files.iter().find(|file| file.mapped.iter().any(|&(begin, end)| begin <= this && this < end)) else {
                return (frames, Reached::NoRow);
            };
            let at = this.wrapping_sub(file.bias) - u64::from(!exact);
            let after = file.functions.partition_point(|&(begin, _, _)| begin <= at);
            let Some(&(_, end, offset)) = after.checked_sub(1).and_then(|i| file.functions.get(i)) else { return (frames, Reached::NoRow) };
            if at >= end {
                return (frames, Reached::NoRow);
            }
            let section = section_of(&file.eh_frame, machine);
            let bases = BaseAddresses::default().set_eh_frame(file.address);
            let fde = section.fde_from_offset(&bases, EhFrameOffset(offset), EhFrame::cie_from_offset).unwrap();
            let row = fde.unwind_info_for_address(&section, &bases, &mut context, at).unwrap();
            let step = Step { section: &section, recording, registers: &registers };
            let Some(cfa) = step.cfa(row.cfa()) else { return (frames, Reached::Stuck) };
            let mut caller = registers;
            caller[sp] = Some(cfa);
            for (register, rule) in row.registers() {
                let Some(place) = caller.get_mut(usize::from(register.0)) else { continue };
                *place = match step.register(*register, rule, cfa) {
                    Ok(value) => value,
                    // Only the return address and the registers it depends on must be known.
                    Err(()) if usize::from(register.0) == ra => return (frames, Reached::Stuck),
                    Err(()) => None,
                };
            }
            exact = fde.is_signal_trampoline();
            registers = caller;
            pc = registers[ra];
        }
    }
}

struct Step<'s> {
    section: &'s EhFrame<Slice<'s>>,
    recording: &'s Recording,
    registers: &'s [Option<u64>; COLUMNS],
}

impl Step<'_> {
    fn cfa(&self, rule: &CfaRule<usize>) -> Option<u64> {
        match rule {
            CfaRule::RegisterAndOffset { register, offset } => {
                Some((*self.registers.get(usize::from(register.0))?)?.wrapping_add_signed(*offset))
            }
            CfaRule::Expression(expression) => self.evaluate(expression, None),
        }
    }

    fn register(&self, register: Register, rule: &RegisterRule<usize>, cfa: u64) -> Result<Option<u64>, ()> {
        let read = |address: u64| self.recording.word(address).map(Some).ok_or(());
        match rule {
            RegisterRule::Undefined => Ok(None),
            RegisterRule::SameValue => Ok(self.registers[usize::from(register.0)]),
            RegisterRule::Offset(offset) => read(cfa.wrapping_add_signed(*offset)),
            RegisterRule::ValOffset(offset) => Ok(Some(cfa.wrapping_add_signed(*offset))),
            RegisterRule::Register(other) => Ok(self.registers[usize::from(other.0)]),
            RegisterRule::Expression(expression) => read(self.evaluate(expression, Some(cfa)).ok_or(())?),
            RegisterRule::ValExpression(expression) => self.evaluate(expression, Some(cfa)).map(Some).ok_or(()),
            _ => Err(()),
        }
    }

    fn evaluate(&self, expression: &UnwindExpression<usize>, initial: Option<u64>) -> Option<u64> {
        let encoding = Encoding { address_size: 8, format: Format::Dwarf32, version: 4 };
        let mut evaluation = expression.get(self.section).ok()?.evaluation(encoding);
        if let Some(value) = initial {
            evaluation.set_initial_value(value);
        }
        let mut result = evaluation.evaluate().ok()?;
        loop {
            result = match result {
                EvaluationResult::Complete => break,
                EvaluationResult::RequiresMemory { address, size: 8, .. } => {
                    evaluation.resume_with_memory(Value::Generic(self.recording.word(address)?)).ok()?
                }
                EvaluationResult::RequiresRegister { register, .. } => {
                    evaluation.resume_with_register(Value::Generic((*self.registers.get(usize::from(register.0))?)?)).ok()?
                }
                _ => return None,
            };
        }
        match evaluation.as_result().first()?.location {
            Location::Address { address } => Some(address),
            _ => None,
        }
    }
}

/// framehop over the same files.
pub struct Framehop {
    unwinder: UnwinderX86_64<Vec<u8>>,
    cache: CacheX86_64,
}

impl Framehop {
    /// Adds the files as modules.
    pub fn new(world: &World) -> Self {
        let mut unwinder = UnwinderX86_64::new();
        let mut done = HashMap::new();
        for file in &world.files {
            let Some((bytes, address, bias)) = eh_frame(file) else { continue };
            let begin = file.mapped.iter().map(|m| m.0).min().unwrap();
            let end = file.mapped.iter().map(|m| m.1).max().unwrap();
            if done.insert(begin, ()).is_some() {
                continue;
            }
            let sections = ExplicitModuleSectionInfo {
                base_svma: 0,
                eh_frame_svma: Some(address..address + bytes.len() as u64),
                eh_frame: Some(bytes),
                ..Default::default()
            };
            unwinder.add_module(Module::new(file.path.display().to_string(), begin..end, bias, sections));
        }
        Self { unwinder, cache: CacheX86_64::new() }
    }

    /// Frames (addresses), leaf first, and whether it reached the end.
    pub fn unwind(&mut self, recording: &Recording, limit: usize) -> (Vec<u64>, bool) {
        let regs = UnwindRegsX86_64::new(recording.pc(), recording.sp(), recording.register(6));
        let mut read = |address| recording.word(address).ok_or(());
        let mut frames = Vec::new();
        let mut iter = self.unwinder.iter_frames(recording.pc(), regs, &mut self.cache, &mut read);
        while frames.len() < limit {
            match iter.next() {
                Ok(Some(frame)) => frames.push(frame.address()),
                Ok(None) => return (frames, true),
                Err(_) => break,
            }
        }
        (frames, false)
    }
}
