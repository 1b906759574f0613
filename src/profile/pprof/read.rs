//! pprof to profile: fragprof's own files without loss, and other tools' heap profiles as far as their sample types are known.
//!
//! The input may be anything, so nothing is decoded as a whole: the top-level fields are walked, small messages are decoded one by one,
//! and every table has a limit.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use flate2::read::MultiGzDecoder;
use prost::Message;
use prost::encoding::{WireType, decode_key, decode_varint};
use thiserror::Error;

use super::allocator::{LABEL_ALLOCATED_BY, LABEL_FRAMES, TABLE_COMMENT, put_back, read_table};
use super::proto;
use super::{ERROR_SUFFIX, LABEL_GUESSED, LABEL_PID, LABEL_TRUNCATED, METADATA_COMMENT};
use crate::frame::MODULE_JIT;
use crate::frame::{Frame, FrameFlags};
use crate::profile::kind::{KindSet, StandardErrors, ValueKind, Values};
use crate::profile::meta::{Metadata, Mode, Process};
use crate::profile::model::{FrameId, Profile};

/// Largest file, compressed. A profile of a million stacks has a few ten MiB.
pub const FILE_BYTES_MAX: u64 = 256 << 20;
/// Largest profile after decompression: a million stacks of 60 frames have about 180 MiB. Stops gzip bombs.
pub const PROFILE_BYTES_MAX: u64 = 512 << 20;
/// Entries of each table (samples, locations, functions, strings): four times the million stacks above. An empty entry takes two bytes
/// of input and up to a hundred of memory, so the size of the input alone is no bound.
pub const TABLE_ENTRIES_MAX: usize = 4 << 20;
/// Frames of one stack. Real stacks stay below a few hundred; Go's profiles stop at 128 and Java's deepest recursions at some thousand.
pub const STACK_FRAMES_MAX: usize = 16 << 10;
/// Frames of all stacks together: 512 MiB of memory. A location may stand for many inlined frames, and each reference to it takes two bytes.
pub const FRAMES_TOTAL_MAX: usize = 128 << 20;

/// Why a file could not be read as a profile.
#[derive(Debug, Error)]
pub enum ReadError {
    /// The file could not be opened or read.
    #[error("cannot read the file: {0}")]
    Io(#[from] std::io::Error),
    /// The file is empty.
    #[error("the file is empty")]
    Empty,
    /// The gzip layer is broken.
    #[error("the gzip data is damaged or cut short ({0}): was the file copied in full?")]
    Gzip(String),
    /// A limit of this reader.
    #[error("{what} is above the limit of {limit}: not a profile that fragprof can hold")]
    TooLarge {
        /// The quantity that is too large.
        what: &'static str,
        /// The limit, in the unit given in `what`.
        limit: u64,
    },
    /// A format other than pprof.
    #[error("not a pprof profile, but {0}")]
    Foreign(&'static str),
    /// Not pprof, or broken.
    #[error("not a valid pprof profile: {0}")]
    Malformed(&'static str),
    /// pprof, but not of a heap.
    #[error("the profile has no heap values: its sample types are {0}; fragprof reads inuse_space, alloc_space and the like")]
    NoHeapValues(String),
}

/// Reads a profile from a file.
///
/// # Errors
/// [`ReadError`], which does not name the path: the caller knows it.
pub fn read_file(path: &Path) -> Result<Profile, ReadError> {
    read(File::open(path)?)
}

/// Reads a profile, gzipped or plain.
///
/// # Errors
/// [`ReadError`].
pub fn read(input: impl Read) -> Result<Profile, ReadError> {
    let mut file = Vec::new();
    input.take(FILE_BYTES_MAX + 1).read_to_end(&mut file)?;
    if file.len() as u64 > FILE_BYTES_MAX {
        return Err(ReadError::TooLarge { what: "the file's size in bytes", limit: FILE_BYTES_MAX });
    }
    if file.is_empty() {
        return Err(ReadError::Empty);
    }
    if !file.starts_with(&[0x1f, 0x8b]) {
        return decode(&file);
    }
    let plain = decompress(&file, PROFILE_BYTES_MAX)?;
    drop(file);
    decode(&plain)
}

/// Unpacks gzip data of at most `limit` bytes.
pub(super) fn decompress(file: &[u8], limit: u64) -> Result<Vec<u8>, ReadError> {
    let mut plain = Vec::new();
    MultiGzDecoder::new(file).take(limit + 1).read_to_end(&mut plain).map_err(|error| ReadError::Gzip(error.to_string()))?;
    if plain.len() as u64 > limit {
        return Err(ReadError::TooLarge { what: "the decompressed size in bytes", limit });
    }
    Ok(plain)
}

/// Other formats that users may try, by their first bytes.
const FOREIGN: &[(&[u8], &str)] = &[
    (b"heap profile:", "a text heap profile of gperftools: convert it with `pprof -proto`"),
    (b"heap_v2/", "a text heap profile of jemalloc: convert it with `jeprof --raw` or `pprof -proto`"),
    (b"--- symbol", "a raw profile of jeprof: convert it with `pprof -proto`"),
    (b"PERFILE2", "a perf.data file"),
    (b"\x7fELF", "an ELF file (a program, library or core)"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd-compressed file (heaptrack's format, perhaps)"),
    (b"{", "a JSON file: `report` reads the pprof file that `record` writes"),
    (b"<", "an SVG, XML or HTML file: `report` reads the pprof file that `record` writes"),
];

fn decode(bytes: &[u8]) -> Result<Profile, ReadError> {
    if bytes.is_empty() {
        return Err(ReadError::Empty);
    }
    if let Some((_, what)) = FOREIGN.iter().find(|(start, _)| bytes.starts_with(start)) {
        return Err(ReadError::Foreign(what));
    }
    let tables = Tables::index(bytes)?;
    let columns = tables.columns()?;
    let mut profile = Profile::new(tables.metadata(&columns)?);
    let allocator = tables.allocator_frames()?;
    Samples { tables: &tables, columns: &columns, allocator, strings: HashMap::new(), locations: HashMap::new(), frames_total: 0 }
        .add_all(&mut profile)?;
    Ok(profile)
}

/// The top-level fields, with messages still encoded unless they are small and few.
#[derive(Default)]
struct Tables<'a> {
    sample_types: Vec<proto::ValueType>,
    samples: Vec<&'a [u8]>,
    mappings: HashMap<u64, proto::Mapping>,
    locations: HashMap<u64, &'a [u8]>,
    functions: HashMap<u64, proto::Function>,
    strings: Vec<&'a [u8]>,
    comments: Vec<i64>,
    time_nanos: i64,
    duration_nanos: i64,
}

/// Adds to a table within its limit.
fn bounded(entries: usize, what: &'static str) -> Result<(), ReadError> {
    if entries < TABLE_ENTRIES_MAX { Ok(()) } else { Err(ReadError::TooLarge { what, limit: TABLE_ENTRIES_MAX as u64 }) }
}

fn message<M: Message + Default>(bytes: &[u8], what: &'static str) -> Result<M, ReadError> {
    M::decode(bytes).map_err(|_| ReadError::Malformed(what))
}

/// One field of a message.
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed,
}

/// Takes the next field off the front.
fn next_field<'a>(rest: &mut &'a [u8]) -> Result<(u32, Field<'a>), ReadError> {
    const CUT: ReadError = ReadError::Malformed("a field is cut short: the file is truncated or not a profile");
    let (tag, wire) = decode_key(rest).map_err(|_| ReadError::Malformed("a field has no valid number: not a profile, or damaged"))?;
    let take = |rest: &mut &'a [u8], len: u64| {
        let len = usize::try_from(len).map_err(|_| CUT)?;
        let (taken, after) = rest.split_at_checked(len).ok_or(CUT)?;
        *rest = after;
        Ok::<_, ReadError>(taken)
    };
    let field = match wire {
        WireType::Varint => Field::Number(decode_varint(rest).map_err(|_| CUT)?),
        WireType::LengthDelimited => {
            let len = decode_varint(rest).map_err(|_| CUT)?;
            Field::Bytes(take(rest, len)?)
        }
        WireType::SixtyFourBit => take(rest, 8).map(|_| Field::Fixed)?,
        WireType::ThirtyTwoBit => take(rest, 4).map(|_| Field::Fixed)?,
        WireType::StartGroup | WireType::EndGroup => return Err(ReadError::Malformed("it contains a group, which pprof never does")),
    };
    Ok((tag, field))
}

impl<'a> Tables<'a> {
    fn index(mut rest: &'a [u8]) -> Result<Self, ReadError> {
        let mut tables = Self::default();
        while !rest.is_empty() {
            let (tag, field) = next_field(&mut rest)?;
            match (tag, field) {
                (1, Field::Bytes(bytes)) => {
                    bounded(tables.sample_types.len(), "the number of sample types")?;
                    tables.sample_types.push(message(bytes, "a sample type does not decode")?);
                }
                (2, Field::Bytes(bytes)) => {
                    bounded(tables.samples.len(), "the number of samples")?;
                    tables.samples.push(bytes);
                }
                (3, Field::Bytes(bytes)) => {
                    bounded(tables.mappings.len(), "the number of mappings")?;
                    let mapping: proto::Mapping = message(bytes, "a mapping does not decode")?;
                    tables.mappings.insert(mapping.id, mapping);
                }
                (4, Field::Bytes(bytes)) => {
                    bounded(tables.locations.len(), "the number of locations")?;
                    tables.locations.insert(location_id(bytes)?, bytes);
                }
                (5, Field::Bytes(bytes)) => {
                    bounded(tables.functions.len(), "the number of functions")?;
                    let function: proto::Function = message(bytes, "a function does not decode")?;
                    tables.functions.insert(function.id, function);
                }
                (6, Field::Bytes(bytes)) => {
                    bounded(tables.strings.len(), "the number of strings")?;
                    tables.strings.push(bytes);
                }
                (9, Field::Number(n)) => tables.time_nanos = n as i64,
                (10, Field::Number(n)) => tables.duration_nanos = n as i64,
                (13, Field::Number(n)) => {
                    bounded(tables.comments.len(), "the number of comments")?;
                    tables.comments.push(n as i64);
                }
                (13, Field::Bytes(mut packed)) => {
                    while !packed.is_empty() {
                        bounded(tables.comments.len(), "the number of comments")?;
                        let n = decode_varint(&mut packed).map_err(|_| ReadError::Malformed("a comment does not decode"))?;
                        tables.comments.push(n as i64);
                    }
                }
                (1..=6, _) => return Err(ReadError::Malformed("a table has an entry of the wrong type")),
                // The other fields are not needed; unknown ones may come with later versions.
                _ => {}
            }
        }
        if tables.sample_types.is_empty() {
            return Err(ReadError::Malformed("it has no sample types"));
        }
        if tables.strings.first().is_none_or(|first| !first.is_empty()) {
            return Err(ReadError::Malformed("its string table does not start with the empty string"));
        }
        Ok(tables)
    }

    fn text(&self, index: i64) -> Result<String, ReadError> {
        let bytes = usize::try_from(index).ok().and_then(|i| self.strings.get(i));
        let bytes = bytes.ok_or(ReadError::Malformed("a string index is outside the string table"))?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// The kind of each column of a sample's values; `None` = a column that is not read.
    fn columns(&self) -> Result<Vec<Option<ValueKind>>, ReadError> {
        let mut names = Vec::new();
        let mut columns = Vec::new();
        for sample_type in &self.sample_types {
            let (name, unit) = (self.text(sample_type.r#type)?, self.text(sample_type.unit)?);
            let kind = kind_of(&name, &unit).filter(|&kind| !columns.contains(&Some(kind)));
            columns.push(kind);
            names.push(format!("{name}/{unit}"));
        }
        const NAMES_SHOWN_MAX: usize = 8;
        if columns.iter().all(Option::is_none) {
            names.truncate(NAMES_SHOWN_MAX);
            return Err(ReadError::NoHeapValues(crate::sanitize::terminal(&names.join(", ")).into_owned()));
        }
        Ok(columns)
    }

    /// The allocator's own frames that samples go without, by index.
    fn allocator_frames(&self) -> Result<Vec<Vec<Frame>>, ReadError> {
        for &comment in &self.comments {
            if let Some(json) = self.text(comment)?.strip_prefix(TABLE_COMMENT) {
                return Ok(read_table(json));
            }
        }
        Ok(Vec::new())
    }

    fn metadata(&self, columns: &[Option<ValueKind>]) -> Result<Metadata, ReadError> {
        let present: KindSet = columns.iter().copied().flatten().collect();
        let mut found = Vec::new();
        for &comment in &self.comments {
            let text = self.text(comment)?;
            if let Some(json) = text.strip_prefix(METADATA_COMMENT) {
                found.push(serde_json::from_str::<Metadata>(json).ok());
            }
        }
        let merged_of = found.len();
        let imported = || Metadata {
            mode: Mode::Imported,
            start_unix_ns: self.time_nanos.max(0) as u64,
            duration_s: self.duration_nanos.max(0) as f64 / 1e9,
            kinds: present,
            ..Metadata::default()
        };
        let mut meta = match found.into_iter().next() {
            None => imported(),
            Some(Some(meta)) => meta,
            Some(None) => {
                let mut meta = imported();
                meta.doubts.push("the metadata in the file could not be read: the recording's losses and doubts are not known".into());
                meta
            }
        };
        if merged_of > 1 {
            meta.doubts.push(format!("the file was merged from {merged_of} recordings; its metadata is that of the first"));
        }
        meta.kinds = meta.kinds.iter().filter(|&kind| present.contains(kind)).collect();
        Ok(meta)
    }
}

/// Reads a location's id without decoding the rest.
fn location_id(mut bytes: &[u8]) -> Result<u64, ReadError> {
    let mut id = 0;
    while !bytes.is_empty() {
        if let (1, Field::Number(n)) = next_field(&mut bytes)? {
            id = n;
        }
    }
    Ok(id)
}

/// The kind of a sample type: fragprof's own names (Go's, gperftools' and jemalloc's are among them), and the older `space` and
/// `objects` of converted heap profiles.
fn kind_of(name: &str, unit: &str) -> Option<ValueKind> {
    let kind = match name {
        "space" => ValueKind::InuseSpace,
        "objects" => ValueKind::InuseObjects,
        _ => ValueKind::ALL.into_iter().find(|kind| kind.name() == name)?,
    };
    (kind.unit() == unit).then_some(kind)
}

/// The second pass: samples, with the locations they use.
struct Samples<'t, 'a> {
    tables: &'t Tables<'a>,
    columns: &'t [Option<ValueKind>],
    /// Frames that samples omit.
    allocator: Vec<Vec<Frame>>,
    strings: HashMap<i64, Arc<str>>,
    /// Frames of a location, as certain and as guessed ones.
    locations: HashMap<(u64, bool), Arc<[FrameId]>>,
    frames_total: usize,
}

impl Samples<'_, '_> {
    fn add_all(mut self, profile: &mut Profile) -> Result<(), ReadError> {
        for bytes in &self.tables.samples {
            let sample: proto::Sample = message(bytes, "a sample does not decode")?;
            self.add(profile, &sample)?;
        }
        Ok(())
    }

    fn add(&mut self, profile: &mut Profile, sample: &proto::Sample) -> Result<(), ReadError> {
        if sample.value.len() != self.columns.len() {
            return Err(ReadError::Malformed("a sample has more or fewer values than there are sample types"));
        }
        let mut values = Values::default();
        for (&value, kind) in sample.value.iter().zip(self.columns) {
            if let Some(kind) = *kind {
                let value = u64::try_from(value)
                    .map_err(|_| ReadError::Malformed("a value is negative: the file is a difference of two profiles, not a profile"))?;
                values.set(kind, value);
            }
        }
        let labels = self.labels(&sample.label)?;
        let mut frames: Vec<FrameId> = Vec::new();
        if let Some(allocated_by) = &labels.allocated_by {
            let cut = put_back(&self.allocator, labels.allocator_frames, allocated_by);
            frames.extend(cut.iter().map(|frame| profile.intern(frame)));
        }
        for (index, &location) in sample.location_id.iter().enumerate() {
            let guessed = labels.guessed.contains(&(index as i64));
            frames.extend_from_slice(&self.location(profile, location, guessed)?);
            if frames.len() > STACK_FRAMES_MAX {
                return Err(ReadError::TooLarge { what: "the number of frames of a stack", limit: STACK_FRAMES_MAX as u64 });
            }
        }
        self.frames_total += frames.len();
        if self.frames_total > FRAMES_TOTAL_MAX {
            return Err(ReadError::TooLarge { what: "the number of frames of all stacks", limit: FRAMES_TOTAL_MAX as u64 });
        }
        if frames.is_empty() {
            profile.add_estimate(labels.pid, &[], labels.truncated.as_deref(), &values, &labels.errors);
        } else {
            profile.add_ids_estimate(labels.pid, frames.into(), labels.truncated, &values, &labels.errors);
        }
        if labels.pid != 0 && profile.meta.mode == Mode::Imported && profile.meta.process(labels.pid).is_none() {
            const IMPORTED_PROCESSES_MAX: usize = 1024;
            if profile.meta.processes.len() < IMPORTED_PROCESSES_MAX {
                profile.meta.processes.push(Process { pid: labels.pid, ..Process::default() });
            }
        }
        Ok(())
    }

    fn labels(&mut self, labels: &[proto::Label]) -> Result<Labels, ReadError> {
        let mut found = Labels::default();
        for label in labels {
            match self.string(label.key)?.as_ref() {
                LABEL_PID => found.pid = u32::try_from(label.num).unwrap_or(0),
                LABEL_TRUNCATED => found.truncated = Some(self.string(label.str)?),
                LABEL_GUESSED => found.guessed.push(label.num),
                LABEL_ALLOCATED_BY => found.allocated_by = Some(self.string(label.str)?).filter(|name| !name.is_empty()),
                LABEL_FRAMES => found.allocator_frames = Some(label.num),
                name => {
                    let kind = name.strip_suffix(ERROR_SUFFIX).and_then(|kind| ValueKind::ALL.into_iter().find(|k| k.name() == kind));
                    if let Some(kind) = kind {
                        found.errors.set(kind, u64::try_from(label.num).unwrap_or(0));
                    }
                }
            }
        }
        // Each location is looked up among them.
        found.guessed.truncate(crate::profile::pprof::GUESSED_MAX);
        Ok(found)
    }

    fn string(&mut self, index: i64) -> Result<Arc<str>, ReadError> {
        if let Some(text) = self.strings.get(&index) {
            return Ok(text.clone());
        }
        let text: Arc<str> = self.tables.text(index)?.into();
        self.strings.insert(index, text.clone());
        Ok(text)
    }

    fn location(&mut self, profile: &mut Profile, id: u64, guessed: bool) -> Result<Arc<[FrameId]>, ReadError> {
        if let Some(frames) = self.locations.get(&(id, guessed)) {
            return Ok(frames.clone());
        }
        let bytes = self.tables.locations.get(&id).ok_or(ReadError::Malformed("a sample refers to a location that does not exist"))?;
        let location: proto::Location = message(bytes, "a location does not decode")?;
        if location.line.len() > STACK_FRAMES_MAX {
            return Err(ReadError::TooLarge { what: "the number of lines of a location", limit: STACK_FRAMES_MAX as u64 });
        }
        let mapping = self.tables.mappings.get(&location.mapping_id).copied().unwrap_or_default();
        let (module, build_id) = (self.string(mapping.filename)?, self.string(mapping.build_id)?);
        let jit = &*module == MODULE_JIT;
        let mut frame =
            Frame { module, build_id, address: location.address, flags: FrameFlags { inlined: false, guessed, jit }, ..Frame::named("") };
        let mut ids = Vec::with_capacity(location.line.len().max(1));
        for (index, line) in location.line.iter().enumerate() {
            let function = self.tables.functions.get(&line.function_id).copied().unwrap_or_default();
            frame.function = self.string(function.name)?;
            if frame.function.is_empty() {
                frame.function = unnamed(&frame, &mapping);
            }
            frame.file = self.string(function.filename)?;
            frame.line = u32::try_from(line.line).unwrap_or(0);
            frame.flags.inlined = index + 1 < location.line.len();
            ids.push(profile.intern(&frame));
        }
        if ids.is_empty() {
            frame.function = unnamed(&frame, &mapping);
            ids.push(profile.intern(&frame));
        }
        let ids: Arc<[FrameId]> = ids.into();
        self.locations.insert((id, guessed), ids.clone());
        Ok(ids)
    }
}

/// The contents of a sample's labels.
#[derive(Default)]
struct Labels {
    pid: u32,
    truncated: Option<Arc<str>>,
    guessed: Vec<i64>,
    errors: StandardErrors,
    allocated_by: Option<Arc<str>>,
    /// Index of the omitted frames in the table.
    allocator_frames: Option<i64>,
}

/// A substitute name for a frame: module and offset in its file, or the bare address.
fn unnamed(frame: &Frame, mapping: &proto::Mapping) -> Arc<str> {
    let name = frame.module.rsplit('/').next().unwrap_or_default();
    if name.is_empty() {
        return format!("[{:#x}]", frame.address).into();
    }
    let offset = frame.address.wrapping_sub(mapping.memory_start).wrapping_add(mapping.file_offset);
    format!("[{name}+{offset:#x}]").into()
}
