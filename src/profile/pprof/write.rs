//! Profile to pprof.

use std::collections::HashMap;
use std::io::{self, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use prost::Message;

use super::allocator::{LABEL_ALLOCATED_BY, LABEL_FRAMES, Trimmed};
use super::proto;
use super::{
    ERROR_SUFFIX, LABEL_BOUND, LABEL_BOUND_RATES, LABEL_COMM, LABEL_GUESSED, LABEL_GUESSED_UNIT, LABEL_PID, LABEL_RUNTIME, LABEL_TRUNCATED,
    METADATA_COMMENT,
};
use crate::frame::Frame;
use crate::profile::kind::{KindSet, ValueKind, Values};
use crate::profile::model::{FrameId, Profile, Stack};

/// Most processes with a readable comment saying that values are lower bounds; the samples' labels say it for all.
const BOUNDS_TOLD_MAX: usize = 16;

/// Writes the profile as gzipped pprof.
///
/// # Errors
/// What the writer reports.
pub fn write(profile: &Profile, out: impl Write) -> io::Result<()> {
    zip(&encode(profile), out)
}

/// Writes a part of a profile as gzipped pprof.
///
/// # Errors
/// What the writer reports.
pub fn write_part(profile: &Profile, part: &Part<'_>, out: impl Write) -> io::Result<()> {
    zip(&encode_part(profile, part), out)
}

fn zip(message: &proto::Profile, out: impl Write) -> io::Result<()> {
    let mut gzip = GzEncoder::new(out, Compression::default());
    gzip.write_all(&message.encode_to_vec())?;
    gzip.finish()?.flush()
}

/// Some kinds of a profile with values and a time of their own, such as one interval of a long recording. It is for servers that store many
/// of them: without stacks that have no value, without the metadata, and with only the sample label that marks lower bounds.
#[derive(Debug, Clone, Copy)]
pub struct Part<'a> {
    /// The sample types, in the order of [`ValueKind::ALL`].
    pub kinds: KindSet,
    /// The values of each stack, in the order of [`Profile::stacks`].
    pub rows: &'a [Values],
    /// When the values were collected, nanoseconds since the Unix epoch.
    pub time_unix_ns: u64,
    /// The time that they cover, in nanoseconds; 0 = a moment.
    pub duration_ns: u64,
}

/// The part as a pprof message.
fn encode_part(profile: &Profile, part: &Part<'_>) -> proto::Profile {
    let mut encoder = Encoder::default();
    let kinds: Vec<ValueKind> = part.kinds.iter().collect();
    let sample_type = kinds.iter().map(|kind| encoder.value_type(kind.name(), kind.unit())).collect();
    let has_rates = kinds.contains(&ValueKind::AllocSpace);
    let mut sample = Vec::new();
    for (stack, row) in profile.stacks().iter().zip(part.rows) {
        let value: Vec<i64> = kinds.iter().map(|&kind| signed(row.get(kind))).collect();
        if value.iter().any(|&value| value > 0) {
            let (_, frames) = stack.frames.split_at(encoder.trimmed.trim(profile, &stack.frames).map_or(0, |(frames, _)| frames));
            let location_id = encoder.locations(profile, frames).iter().map(|l| l.id).collect();
            let label = if has_rates { encoder.bound_label(profile, stack).into_iter().collect() } else { Vec::new() };
            sample.push(proto::Sample { location_id, value, label });
        }
    }
    let default = [ValueKind::LiveSpace, ValueKind::InuseSpace, ValueKind::AllocSpace].into_iter().find(|kind| kinds.contains(kind));
    let default = default.or_else(|| kinds.first().copied()).map_or("", ValueKind::name);
    let default_sample_type = encoder.strings.id(default);
    encoder.finish(sample_type, sample, part.time_unix_ns, part.duration_ns, default_sample_type)
}

/// The profile as a pprof message.
///
/// The seven fixed sample types are always present; the others if measured. Values above `i64::MAX` are written as `i64::MAX`.
pub fn encode(profile: &Profile) -> proto::Profile {
    let mut encoder = Encoder::default();
    let kinds: Vec<ValueKind> = ValueKind::ALL
        .into_iter()
        .enumerate()
        .filter(|&(i, kind)| i < ValueKind::ALWAYS_WRITTEN || profile.meta.kinds.contains(kind))
        .map(|(_, kind)| kind)
        .collect();
    let sample_type = kinds.iter().map(|kind| encoder.value_type(kind.name(), kind.unit())).collect();
    let sample = profile
        .stacks()
        .iter()
        .map(|stack| {
            let trimmed = encoder.trimmed.trim(profile, &stack.frames);
            let (cut, frames) = stack.frames.split_at(trimmed.map_or(0, |(frames, _)| frames));
            let locations = encoder.locations(profile, frames);
            let mut label = encoder.labels(profile, stack, &locations);
            if let Some(((_, index), called)) = trimmed.zip(cut.last()) {
                label.extend(encoder.allocator_labels(index, &profile.frame(*called).function));
            }
            proto::Sample {
                location_id: locations.iter().map(|l| l.id).collect(),
                value: kinds.iter().map(|&kind| signed(stack.values.get(kind))).collect(),
                label,
            }
        })
        .collect();

    let meta = &profile.meta;
    // Serialising plain values cannot fail; if it did, the file would still be a profile, without its metadata.
    let metadata = serde_json::to_string(meta).map(|json| format!("{METADATA_COMMENT}{json}"));
    let bounds = meta.governed.iter().filter(|governed| governed.rates_are_lower_bounds).take(BOUNDS_TOLD_MAX);
    let bounds = bounds.map(|governed| {
        format!("fragprof: alloc and survivor values of process {} are lower bounds: {}", governed.pid, governed.lower_bounds_because)
    });
    let allocator = encoder.trimmed.comment(profile);
    let comment = metadata.into_iter().chain(allocator).chain(bounds).map(|text| encoder.strings.id(&text)).collect();
    let default_sample_type = encoder.strings.id(profile.leading_kind().name());
    let duration_ns = (meta.duration_s * 1e9) as u64; // `as` saturates, and takes NaN to 0
    let message = encoder.finish(sample_type, sample, meta.start_unix_ns, duration_ns, default_sample_type);
    proto::Profile { comment, ..message }
}

fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// A location's id and whether it is a guess.
#[derive(Clone, Copy)]
struct LocationRef {
    id: u64,
    guessed: bool,
}

#[derive(Default)]
struct Encoder {
    strings: Strings,
    trimmed: Trimmed,
    mappings: Vec<proto::Mapping>,
    mapping_ids: HashMap<(i64, i64), u64>,
    locations: Vec<proto::Location>,
    location_ids: HashMap<Vec<FrameId>, u64>,
    functions: Vec<proto::Function>,
    function_ids: HashMap<(i64, i64), u64>,
}

impl Encoder {
    /// The message, without comments.
    fn finish(
        mut self,
        sample_type: Vec<proto::ValueType>,
        sample: Vec<proto::Sample>,
        time_unix_ns: u64,
        duration_ns: u64,
        default_sample_type: i64,
    ) -> proto::Profile {
        let period_type = Some(self.value_type("space", "bytes"));
        proto::Profile {
            sample_type,
            sample,
            mapping: self.mappings,
            location: self.locations,
            function: self.functions,
            drop_frames: 0,
            keep_frames: 0,
            time_nanos: signed(time_unix_ns),
            duration_nanos: signed(duration_ns),
            period_type,
            // A period of one: every byte counts as itself.
            period: 1,
            comment: Vec::new(),
            default_sample_type,
            doc_url: 0,
            string_table: self.strings.texts,
        }
    }

    fn value_type(&mut self, name: &str, unit: &str) -> proto::ValueType {
        proto::ValueType { r#type: self.strings.id(name), unit: self.strings.id(unit) }
    }

    /// A stack's locations: each is a frame with the frames that were inlined into it before it.
    fn locations(&mut self, profile: &Profile, frames: &[FrameId]) -> Vec<LocationRef> {
        let ends_location = |id: &FrameId| !profile.frame(*id).flags.inlined;
        frames
            .split_inclusive(ends_location)
            .map(|group| {
                let id = match self.location_ids.get(group) {
                    Some(&id) => id,
                    None => self.new_location(profile, group),
                };
                LocationRef { id, guessed: group.iter().any(|&f| profile.frame(f).flags.guessed) }
            })
            .collect()
    }

    fn new_location(&mut self, profile: &Profile, group: &[FrameId]) -> u64 {
        let id = self.locations.len() as u64 + 1;
        // The last frame is the function that contains the address.
        let (address, mapping_id) = match group.last() {
            Some(&outer) => (profile.frame(outer).address, self.mapping(profile.frame(outer), group.len() > 1)),
            None => (0, 0),
        };
        let line = group
            .iter()
            .map(|&frame| {
                let frame = profile.frame(frame);
                proto::Line { function_id: self.function(frame), line: i64::from(frame.line), column: 0 }
            })
            .collect();
        self.locations.push(proto::Location { id, mapping_id, address, line, is_folded: false });
        self.location_ids.insert(group.to_vec(), id);
        id
    }

    /// Addresses are those of the module's file, so a mapping starts at 0 and extends past the highest address seen.
    fn mapping(&mut self, frame: &Frame, has_inlined: bool) -> u64 {
        if frame.module.is_empty() {
            return 0;
        }
        let key = (self.strings.id(&frame.module), self.strings.id(&frame.build_id));
        let next = self.mappings.len() as u64 + 1;
        let id = *self.mapping_ids.entry(key).or_insert(next);
        if id == next {
            // Names are resolved already: tools must not try again with the file at that path on their own machine.
            let has_functions = true;
            self.mappings.push(proto::Mapping { id, filename: key.0, build_id: key.1, has_functions, ..Default::default() });
        }
        if let Some(mapping) = usize::try_from(id - 1).ok().and_then(|i| self.mappings.get_mut(i)) {
            const PAGE: u64 = 4096;
            mapping.memory_limit = mapping.memory_limit.max(frame.address.saturating_add(PAGE) & !(PAGE - 1));
            mapping.has_filenames |= !frame.file.is_empty();
            mapping.has_line_numbers |= frame.line != 0;
            mapping.has_inline_frames |= has_inlined;
        }
        id
    }

    fn function(&mut self, frame: &Frame) -> u64 {
        let key = (self.strings.id(&frame.function), self.strings.id(&frame.file));
        let next = self.functions.len() as u64 + 1;
        let id = *self.function_ids.entry(key).or_insert(next);
        if id == next {
            self.functions.push(proto::Function { id, name: key.0, system_name: key.0, filename: key.1, start_line: 0 });
        }
        id
    }

    /// The labels for the allocator's own frames that the sample omits.
    fn allocator_labels(&mut self, index: usize, called: &str) -> [proto::Label; 2] {
        let (by, called) = (self.strings.id(LABEL_ALLOCATED_BY), self.strings.id(called));
        let (key, num_unit) = (self.strings.id(LABEL_FRAMES), self.strings.id(LABEL_GUESSED_UNIT));
        [
            proto::Label { key: by, str: called, ..Default::default() },
            proto::Label { key, num: index as i64, num_unit, ..Default::default() },
        ]
    }

    /// The label for stacks of a process whose rates are lower bounds.
    fn bound_label(&mut self, profile: &Profile, stack: &Stack) -> Option<proto::Label> {
        let is_bound = profile.is_lower_bound(stack.pid, ValueKind::AllocSpace);
        is_bound.then(|| proto::Label { key: self.strings.id(LABEL_BOUND), str: self.strings.id(LABEL_BOUND_RATES), ..Default::default() })
    }

    fn labels(&mut self, profile: &Profile, stack: &Stack, locations: &[LocationRef]) -> Vec<proto::Label> {
        let mut labels = Vec::new();
        if stack.pid != 0 {
            labels.push(proto::Label { key: self.strings.id(LABEL_PID), num: i64::from(stack.pid), ..Default::default() });
            if let Some(process) = profile.meta.process(stack.pid) {
                let comm = (!process.comm.is_empty()).then_some((LABEL_COMM, &process.comm));
                let container = process.container_labels.iter().map(|(name, value)| (name.as_str(), value));
                for (name, value) in comm.into_iter().chain(container) {
                    let (key, str) = (self.strings.id(name), self.strings.id(value));
                    labels.push(proto::Label { key, str, ..Default::default() });
                }
            }
        }
        if let Some(reason) = stack.truncated.as_deref().filter(|reason| !reason.is_empty()) {
            let (key, str) = (self.strings.id(LABEL_TRUNCATED), self.strings.id(reason));
            labels.push(proto::Label { key, str, ..Default::default() });
        }
        if let Some(frame) = profile.frames_of(stack).find(|frame| frame.kind().is_managed()) {
            let (key, str) = (self.strings.id(LABEL_RUNTIME), self.strings.id(frame.kind().runtime()));
            labels.push(proto::Label { key, str, ..Default::default() });
        }
        labels.extend(self.bound_label(profile, stack));
        for kind in ValueKind::ALL.into_iter().filter(|&kind| stack.errors.get(kind) > 0) {
            let (key, num_unit) = (self.strings.id(&format!("{}{ERROR_SUFFIX}", kind.name())), self.strings.id(kind.unit()));
            labels.push(proto::Label { key, num: signed(stack.errors.get(kind)), num_unit, ..Default::default() });
        }
        for (index, _) in locations.iter().enumerate().filter(|(_, l)| l.guessed) {
            let (key, num_unit) = (self.strings.id(LABEL_GUESSED), self.strings.id(LABEL_GUESSED_UNIT));
            labels.push(proto::Label { key, num: index as i64, num_unit, ..Default::default() });
        }
        labels
    }
}

/// The string table. Its first entry is the empty string.
struct Strings {
    texts: Vec<String>,
    ids: HashMap<String, i64>,
}

impl Default for Strings {
    fn default() -> Self {
        Self { texts: vec![String::new()], ids: HashMap::from([(String::new(), 0)]) }
    }
}

impl Strings {
    fn id(&mut self, text: &str) -> i64 {
        if let Some(&id) = self.ids.get(text) {
            return id;
        }
        let id = self.texts.len() as i64;
        self.texts.push(text.to_owned());
        self.ids.insert(text.to_owned(), id);
        id
    }
}
