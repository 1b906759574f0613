//! Where a CPython keeps its frames, by version.
//!
//! The offsets of 3.8 to 3.12 are those of the headers of their releases on 64-bit Linux: `Include/internal/pycore_runtime.h`,
//! `pycore_interp.h`, `pycore_frame.h`, `Include/cpython/pystate.h`, `code.h`, `frameobject.h` and `unicodeobject.h`. They are the same in all
//! releases of a minor version. From 3.13 on the interpreter describes itself in `_Py_DebugOffsets`, the first field of `_PyRuntime`.

use zerocopy::FromZeros as _;

use super::Refusal;
use crate::bpf::{self, PYTHON_CODE_BYTES, PYTHON_FRAME_BYTES, PYTHON_NONE, PYTHON_THREAD_BYTES, PythonShape};
use crate::census::memory::{word_at, word32_at};

/// Oldest and newest minor version whose frames are read.
const OLDEST: u8 = 8;
const NEWEST: u8 = 14;

/// How a code object's table of lines is encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LineFormat {
    /// `co_lnotab`, until 3.9.
    Lnotab,
    /// `co_linetable` of 3.10 (PEP 626).
    Ranges,
    /// `co_linetable` from 3.11 on (PEP 657).
    Locations,
}

/// What is known of a version.
#[derive(Debug, Clone)]
pub struct Layout {
    /// What the unwinder needs; without addresses.
    pub record: bpf::Python,
    /// From `_PyRuntime` to the list of interpreters.
    pub interpreters: u64,
    /// How lines are encoded.
    pub lines: LineFormat,
}

/// Which release it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Of 3.x.
    pub minor: u8,
    /// Of 3.x.y, where it is known.
    pub micro: Option<u8>,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.micro {
            Some(micro) => write!(f, "3.{}.{micro}", self.minor),
            None => write!(f, "3.{}", self.minor),
        }
    }
}

impl Version {
    /// From `PY_VERSION_HEX`.
    ///
    /// # Errors
    /// If the version has no layout here.
    pub fn of_hex(hex: u64) -> Result<Self, Refusal> {
        let [level, micro, minor, major, ..] = hex.to_le_bytes();
        let version = Self { minor, micro: Some(micro) };
        if major != 3 || hex >> 32 != 0 {
            return Err(Refusal::Unknown(format!("version {major}.{minor}")));
        }
        // PY_RELEASE_LEVEL: alpha, beta, release candidate, final.
        if level >> 4 < 0xc {
            return Err(Refusal::Unknown(format!("{version}, which is not a release")));
        }
        Ok(version)
    }
}

/// Offsets within `_Py_DebugOffsets`, in words (3.13: `Include/internal/pycore_runtime.h`; 3.14: `pycore_debug_offsets.h`).
struct Described<'a> {
    words: &'a [u8],
    is_14: bool,
}

/// Bytes of `_PyRuntime` that are read from the file: 3.14 has 310 KB.
pub const RUNTIME_BYTES_MAX: u64 = 512 << 10;
/// Offsets are small: interpreters have some 100 KiB.
const OFFSET_MAX: u64 = 1 << 20;

impl Described<'_> {
    fn word(&self, at: usize) -> u64 {
        word_at(self.words, at * 8)
    }

    /// A field of a structure, by its place in 3.13 and in 3.14.
    fn field(&self, of_13: usize, of_14: usize) -> Result<u32, Refusal> {
        let value = self.word(if self.is_14 { of_14 } else { of_13 });
        u32::try_from(value).ok().filter(|&value| u64::from(value) < OFFSET_MAX).ok_or(Refusal::Description)
    }
}

impl Layout {
    /// The layout of a version. `runtime`: what `_PyRuntime` begins with in the file, which is constant.
    ///
    /// # Errors
    /// If its frames cannot be read.
    pub fn of(version: Version, runtime: &[u8]) -> Result<Self, Refusal> {
        match version.minor {
            ..OLDEST => Err(Refusal::Unknown(format!("{version}, which is older than 3.{OLDEST}"))),
            8 | 9 => Ok(of_objects()),
            10 => Ok(of_3_10()),
            11 => Ok(of_3_11()),
            12 => Ok(of_3_12()),
            13..=NEWEST => described(version, runtime),
            _ => Err(Refusal::Unknown(format!("{version}, which is newer than 3.{NEWEST}"))),
        }
    }
}

/// What all versions have in common.
fn common(shape: PythonShape) -> bpf::Python {
    let none = PYTHON_NONE;
    bpf::Python {
        shape: shape as u32,
        interpreter_next: 0,
        thread_next: 8,
        thread_frame: none,
        thread_cframe: none,
        cframe_frame: none,
        cframe_previous: none,
        frame_owner: 0,
        frame_entry: 0,
        owner_generator: 1,
        owner_shim: 3,
        code_version: none,
        code_first_traceable: none,
        code_bytecode: 0,
        text_length: 16,
        text_state: 32,
        text_kind_shift: 2,
        text_ascii: 48,
        text_compact: 72,
        bytes_length: 16,
        bytes_data: 32,
        ..bpf::Python::new_zeroed()
    }
}

fn of_objects() -> Layout {
    let record = bpf::Python {
        interpreter_threads: 8,
        thread_id: 176,
        thread_frame: 24,
        frame_bytes: 112,
        frame_previous: 24,
        frame_code: 32,
        frame_instruction: 104,
        code_bytes: 128,
        code_file: 104,
        code_name: 112,
        code_lines: 120,
        code_first_line: 40,
        ..common(PythonShape::Objects)
    };
    Layout { record, interpreters: 32, lines: LineFormat::Lnotab }
}

fn of_3_10() -> Layout {
    let record = bpf::Python {
        shape: PythonShape::ObjectsCframe as u32,
        thread_cframe: 48,
        cframe_previous: 8,
        frame_instruction: 96,
        ..of_objects().record
    };
    Layout { record, interpreters: 32, lines: LineFormat::Ranges }
}

fn of_3_11() -> Layout {
    let record = bpf::Python {
        interpreter_threads: 16,
        thread_id: 152,
        thread_cframe: 56,
        cframe_frame: 8,
        cframe_previous: 16,
        frame_bytes: 72,
        frame_previous: 48,
        frame_code: 32,
        frame_instruction: 56,
        frame_owner: 69,
        frame_entry: 68,
        code_bytes: 176,
        code_file: 112,
        code_name: 128,
        code_lines: 136,
        code_first_line: 72,
        code_first_traceable: 168,
        code_bytecode: 184,
        ..common(PythonShape::Entries)
    };
    Layout { record, interpreters: 40, lines: LineFormat::Locations }
}

fn of_3_12() -> Layout {
    let record = bpf::Python {
        interpreter_threads: 72,
        thread_id: 136,
        thread_cframe: 56,
        cframe_frame: 0,
        cframe_previous: 8,
        frame_bytes: 72,
        frame_previous: 8,
        frame_code: 0,
        frame_instruction: 56,
        frame_owner: 70,
        code_bytes: 184,
        code_file: 112,
        code_name: 128,
        code_lines: 136,
        code_first_line: 68,
        code_version: 92,
        code_first_traceable: 176,
        code_bytecode: 192,
        text_ascii: 40,
        text_compact: 56,
        ..common(PythonShape::Shims)
    };
    Layout { record, interpreters: 40, lines: LineFormat::Locations }
}

/// How far the kind of a text is shifted in its state: the bits before it say whether the text is interned, 2 of them or, in releases of 3.14,
/// 16 (`PyASCIIObject`, Include/cpython/unicodeobject.h). No offset tells it, but the texts of one character do, which are in `_PyRuntime`
/// (`_Py_SINGLETON(strings).ascii`): ASCII, compact, of one byte a character, static, without a hash yet.
fn kind_shift(runtime: &[u8], text_ascii: u32) -> u32 {
    const LENGTH: usize = 16;
    const STATE: u32 = 1 | 1 << 3 | 1 << 4 | 1 << 5;
    let text_of = |object: &[u8]| object.get(text_ascii as usize..).is_some_and(|text| matches!(text, [1..=0x7f, 0, ..]));
    let count = |shift: u32| {
        let is_one = |at: &usize| {
            let object = runtime.get(*at..).unwrap_or_default();
            word_at(object, LENGTH) == 1
                && word_at(object, LENGTH + 8) == u64::MAX
                && word32_at(object, LENGTH + 16) == STATE << shift
                && text_of(object)
        };
        (0..runtime.len()).step_by(8).filter(is_one).count()
    };
    if count(16) > count(2) { 16 } else { 2 }
}

/// From 3.13 on.
fn described(version: Version, words: &[u8]) -> Result<Layout, Refusal> {
    let is_14 = version.minor == 14;
    let offsets = Described { words, is_14 };
    if offsets.words.get(..8) != Some(b"xdebugpy") || Version::of_hex(offsets.word(1)) != Ok(version) {
        return Err(Refusal::Description);
    }
    if offsets.word(2) != 0 {
        return Err(Refusal::FreeThreaded(version));
    }
    let code_bytecode = offsets.field(43, 48)?;
    // `_co_firsttraceable` lies between the fields that are described: 16 bytes before the bytecode, since 3.12.
    let code_first_traceable = code_bytecode.checked_sub(16).ok_or(Refusal::Description)?;
    let text_ascii = offsets.field(70, 80)?;
    let owner = offsets.field(33, 36)?;
    let record = bpf::Python {
        interpreter_next: offsets.field(8, 8)?,
        interpreter_threads: offsets.field(9, 9)?,
        thread_next: offsets.field(21, 24)?,
        thread_id: offsets.field(24, 27)?,
        thread_frame: offsets.field(23, 26)?,
        frame_bytes: (owner + 8) & !7,
        frame_previous: offsets.field(29, 32)?,
        frame_code: offsets.field(30, 33)?,
        frame_instruction: offsets.field(31, 34)?,
        frame_owner: owner,
        code_bytes: (code_first_traceable + 8) & !7,
        code_file: offsets.field(35, 40)?,
        code_name: offsets.field(37, 42)?,
        code_lines: offsets.field(38, 43)?,
        code_first_line: offsets.field(39, 44)?,
        code_version: 92,
        code_first_traceable,
        code_bytecode,
        text_ascii,
        text_compact: text_ascii + 16,
        text_kind_shift: kind_shift(words, text_ascii),
        ..common(PythonShape::Shims)
    };
    let of_thread = [record.thread_id, record.thread_frame];
    if record.frame_bytes > PYTHON_FRAME_BYTES
        || record.code_bytes > PYTHON_CODE_BYTES
        || of_thread.into_iter().max() > Some(PYTHON_THREAD_BYTES - 8)
    {
        return Err(Refusal::Description);
    }
    Ok(Layout { record, interpreters: offsets.word(5), lines: LineFormat::Locations })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_of_one_character_tell_where_the_kind_is() {
        let runtime = |state: u32| {
            let mut bytes = vec![0u8; 4096];
            for (number, object) in bytes.chunks_exact_mut(64).enumerate().skip(1) {
                object[16..24].copy_from_slice(&1u64.to_le_bytes());
                object[24..32].copy_from_slice(&u64::MAX.to_le_bytes());
                object[32..36].copy_from_slice(&state.to_le_bytes());
                object[40] = number as u8;
            }
            bytes
        };
        assert_eq!(kind_shift(&runtime(0xe4), 40), 2);
        assert_eq!(kind_shift(&runtime(0x39_0000), 40), 16);
        assert_eq!(kind_shift(&runtime(0), 40), 2);
        assert_eq!(kind_shift(&runtime(0xe4)[..100], 40), 2);
    }
}
