//! What a code object says: the function's name, its file, its lines.

use std::collections::HashMap;
use std::sync::Arc;

use super::layout::{Layout, LineFormat};
use super::lines::line_of;
use crate::bpf::{self, PYTHON_LINES_MAX};
use crate::census::Memory;
use crate::census::memory::{word_at, word32_at};
use crate::symbol::capped;

/// Most that is read of a table of lines: of a module with 100,000 lines.
const LINES_BYTES_MAX: u64 = 4 << 20;
/// Most that is read of a text.
const TEXT_BYTES_MAX: u64 = 4096;
/// The state of a text, shifted to its kind: bytes of a character; in one block with its characters; all of them ASCII.
const KIND: u32 = 7;
const IS_COMPACT: u32 = 8;
const IS_ASCII: u32 = 16;

/// A code object.
#[derive(Debug)]
pub struct Code {
    /// The function's name; empty = it could not be read.
    pub function: Arc<str>,
    /// Its file; empty = it could not be read.
    pub file: Arc<str>,
    first_line: u32,
    lines: Vec<u8>,
    /// The table is complete.
    is_whole: bool,
    format: LineFormat,
    /// Numbers of names, by instruction.
    pub words: HashMap<i32, u64>,
}

/// The parts of a record that are sent of it.
#[derive(Debug, Clone, Copy)]
pub struct Definition<'a> {
    /// The fixed part.
    pub code: &'a bpf::PythonCode,
    /// A part of the table of lines.
    pub lines: &'a [u8],
}

impl Code {
    /// From what was sent when the code object was first seen. What could not be sent is read now, if the code object is still the same.
    pub fn read(memory: &dyn Memory, layout: &Layout, definition: Definition<'_>) -> Self {
        let Definition { code, lines } = definition;
        let is_cut = |text: &bpf::PythonText| u64::from(text.bytes) < text.length.saturating_mul(u64::from(text.state & KIND));
        let (name, file) = (sent(&code.name, &code.name_bytes), sent(&code.file, &code.file_bytes));
        let rest = if is_cut(&code.name) || is_cut(&code.file) { Rest::read(memory, layout, code) } else { None };
        let (of_rest, file_of_rest) = rest.map_or((None, None), |rest| (rest.name, rest.file));
        let whole = |sent: Option<String>, text: &bpf::PythonText, rest: Option<String>| match rest {
            None if is_cut(text) => sent.map(|sent| sent + "…"),
            None => sent,
            rest => rest,
        };
        let (name, file) = (whole(name, &code.name, of_rest), whole(file, &code.file, file_of_rest));
        let text = |text: Option<String>| Arc::<str>::from(&*capped(&text.unwrap_or_default()));
        let mut read = Self {
            function: text(name),
            file: text(file),
            first_line: code.first_line,
            lines: lines.to_vec(),
            is_whole: true,
            format: layout.lines,
            words: HashMap::new(),
        };
        read.complete(memory, layout, code);
        read
    }

    /// Adds a further part of the table of lines.
    pub fn extend(&mut self, memory: &dyn Memory, layout: &Layout, definition: Definition<'_>) {
        let Definition { code, lines } = definition;
        if code.lines_at as usize == self.lines.len() && self.lines.len() < PYTHON_LINES_MAX as usize {
            self.lines.extend_from_slice(lines);
        }
        self.complete(memory, layout, code);
    }

    /// Reads the table of lines from memory if no further part of it is sent.
    fn complete(&mut self, memory: &dyn Memory, layout: &Layout, code: &bpf::PythonCode) {
        let length = self.lines.len() as u64;
        self.is_whole = length >= code.lines.length;
        if !self.is_whole
            && (code.lines.bytes == 0 || length >= u64::from(PYTHON_LINES_MAX))
            && let Some(lines) = Rest::read(memory, layout, code).and_then(|rest| rest.lines)
        {
            (self.lines, self.is_whole) = (lines, true);
        }
    }

    /// The line of an instruction, as a frame has it; 0 = none.
    pub fn line(&self, instruction: i32) -> u32 {
        let unit = if self.format == LineFormat::Ranges { 2 } else { 1 };
        line_of(self.format, &self.lines, self.is_whole, self.first_line, i64::from(instruction) * unit)
    }

    /// Bytes that it occupies, roughly.
    pub fn bytes(&self) -> usize {
        self.lines.len() + self.function.len() + self.file.len() + 256
    }
}

/// What was too long to be sent, or not in memory.
struct Rest {
    name: Option<String>,
    file: Option<String>,
    lines: Option<Vec<u8>>,
}

impl Rest {
    /// `None` if it is another code object by now.
    fn read(memory: &dyn Memory, layout: &Layout, code: &bpf::PythonCode) -> Option<Self> {
        let is_same = || {
            let field = |at: u32| memory.word(code.code.wrapping_add(u64::from(at)));
            let line = memory.bytes(code.code.wrapping_add(u64::from(layout.record.code_first_line)), 4).map(|bytes| word32_at(&bytes, 0));
            field(layout.record.code_name) == Some(code.name.object)
                && field(layout.record.code_file) == Some(code.file.object)
                && field(layout.record.code_lines) == Some(code.lines.object)
                && line == Some(code.first_line)
        };
        if !is_same() {
            return None;
        }
        let rest = Self {
            name: text_at(memory, layout, code.name.object),
            file: text_at(memory, layout, code.file.object),
            lines: lines_at(memory, layout, code.lines.object),
        };
        is_same().then_some(rest)
    }
}

/// A text as it was sent; `None` if nothing was.
fn sent(text: &bpf::PythonText, bytes: &[u8]) -> Option<String> {
    let bytes = bytes.get(..text.bytes as usize)?;
    (!bytes.is_empty()).then(|| decoded(text.state, bytes)).flatten()
}

/// The characters of a text object in one block.
fn decoded(state: u32, bytes: &[u8]) -> Option<String> {
    let character = |code: u32| char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER);
    if state & IS_COMPACT == 0 {
        return None;
    }
    let text: String = match state & KIND {
        1 => bytes.iter().map(|&byte| char::from(byte)).collect(),
        2 => bytes.chunks_exact(2).map(|unit| character(u32::from(unit[0]) | u32::from(unit[1]) << 8)).collect(),
        4 => bytes.chunks_exact(4).map(|unit| character(word32_at(unit, 0))).collect(),
        _ => return None,
    };
    Some(text)
}

fn text_at(memory: &dyn Memory, layout: &Layout, object: u64) -> Option<String> {
    let record = &layout.record;
    let head = memory.bytes(object, record.text_ascii as usize)?;
    let length = word_at(&head, record.text_length as usize);
    let state = word32_at(&head, record.text_state as usize) >> (record.text_kind_shift & 31);
    let bytes = length.saturating_mul(u64::from(state & KIND)).min(TEXT_BYTES_MAX);
    let begin = if state & IS_ASCII != 0 { record.text_ascii } else { record.text_compact };
    let bytes = memory.bytes(object.wrapping_add(u64::from(begin)), usize::try_from(bytes).ok()?)?;
    (!bytes.is_empty()).then(|| decoded(state, &bytes)).flatten()
}

fn lines_at(memory: &dyn Memory, layout: &Layout, object: u64) -> Option<Vec<u8>> {
    let length = memory.word(object.wrapping_add(u64::from(layout.record.bytes_length)))?.min(LINES_BYTES_MAX);
    memory.bytes(object.wrapping_add(u64::from(layout.record.bytes_data)), usize::try_from(length).ok()?)
}
