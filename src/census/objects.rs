//! The writable data of the objects that a process has loaded: where allocators keep their roots.

use std::cell::{Cell, OnceCell};
use std::ops::{Deref, Range};
use std::rc::Rc;

use super::memory::{Memory, Piece, word_at};
use crate::heap::residency::page_bytes;
use crate::process::elf::{BuildId, Elf, ReadAt};
use crate::process::{Backing, Maps};

/// Most data and bss of one object that is searched; larger ones (a static table of a database) are cut.
const OBJECT_BYTES_MAX: u64 = 64 << 20;
/// Most objects searched; a desktop program loads a few hundred.
const OBJECTS_MAX: usize = 4096;
/// Bytes of an object's first segment in which its headers and notes lie.
const HEADER_BYTES_MAX: u64 = 64 << 10;

/// The writable data (with the bss that follows) of one loaded object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectData {
    /// First and last address of data and bss.
    pub range: Range<u64>,
    /// Where its file's first byte is mapped; the data's own start if that is not known.
    pub base: u64,
    /// The file's name, without directories.
    pub name: String,
}

/// Bytes of objects' data kept during one census; what does not fit is read again by each reader that needs it.
const DATA_KEPT_BYTES_MAX: u64 = 64 << 20;

/// A process's objects, whose data and build ids are read at most once for all readers.
pub struct Objects<'a> {
    memory: &'a dyn Memory,
    list: Vec<Loaded>,
    kept_bytes: Cell<u64>,
}

/// One object and what was read of it.
struct Loaded {
    object: ObjectData,
    data: OnceCell<Rc<Data>>,
    build_id: OnceCell<Option<BuildId>>,
}

impl<'a> Objects<'a> {
    /// The objects of these mappings; nothing is read yet.
    #[must_use]
    pub fn of(memory: &'a dyn Memory, maps: &Maps) -> Self {
        let loaded = |object| Loaded { object, data: OnceCell::new(), build_id: OnceCell::new() };
        Self { memory, list: objects(maps).into_iter().map(loaded).collect(), kept_bytes: Cell::new(0) }
    }

    /// The objects, the most likely owner of a heap first.
    pub fn iter(&self) -> impl Iterator<Item = ObjectRef<'_, 'a>> {
        self.list.iter().map(|loaded| ObjectRef { all: self, loaded })
    }
}

/// Data of an object. Most of a large one was never touched: that reads as zeros here, and takes no memory and no time.
#[derive(Debug, Default)]
pub struct Data {
    bytes: Vec<u8>,
    present: Vec<Range<usize>>,
    filled: OnceCell<Filled>,
}

/// The words of an object's data that are not 0.
#[derive(Debug, Default)]
struct Filled {
    /// Their numbers, by ascending place.
    numbers: Vec<u32>,
    /// The number of them before each block of [`BLOCK_WORDS`], and the total.
    before: Vec<u32>,
}

/// Words of a block: a page.
const BLOCK_WORDS: usize = 512;

impl Data {
    /// The data at these addresses.
    pub(super) fn read(memory: &dyn Memory, range: Range<u64>) -> Self {
        let (bytes, present) = read_pages(memory, range);
        Self { bytes, present, filled: OnceCell::new() }
    }

    fn filled(&self) -> &Filled {
        self.filled.get_or_init(|| {
            let mut numbers = Vec::new();
            let mut before = vec![0; self.bytes.len() / 8 / BLOCK_WORDS + 2];
            for range in &self.present {
                let words = self.bytes.get(range.clone()).unwrap_or_default().chunks_exact(8);
                for (number, _) in (range.start / 8..).zip(words).filter(|(_, word)| word_at(word, 0) != 0) {
                    numbers.extend(u32::try_from(number).ok());
                    if let Some(count) = before.get_mut(number / BLOCK_WORDS + 1) {
                        *count += 1;
                    }
                }
            }
            let mut sum = 0u32;
            for count in &mut before {
                sum += *count;
                *count = sum;
            }
            Filled { numbers, before }
        })
    }

    /// Whether more than `max` of the words with these numbers are not 0.
    #[must_use]
    pub fn has_more_filled(&self, words: Range<usize>, max: usize) -> bool {
        let Filled { numbers, before } = self.filled();
        let at = |block: usize| before.get(block).or(before.last()).copied().unwrap_or(0) as usize;
        // Tables of pointers are recognised by their whole blocks.
        if at(words.end / BLOCK_WORDS).saturating_sub(at(words.start.div_ceil(BLOCK_WORDS))) > max {
            return true;
        }
        let rank = |word: usize| {
            let (from, to) = (at(word / BLOCK_WORDS), at(word / BLOCK_WORDS + 1));
            from + numbers.get(from..to).unwrap_or_default().partition_point(|&number| (number as usize) < word)
        };
        rank(words.end) - rank(words.start).min(rank(words.end)) > max
    }

    /// The words that are not 0, with their numbers.
    pub fn words(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.filled().numbers.iter().map(|&number| (number as usize, word_at(&self.bytes, 8 * number as usize)))
    }
}

impl Deref for Data {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// One of [`Objects`].
#[derive(Clone, Copy)]
pub struct ObjectRef<'o, 'a> {
    all: &'o Objects<'a>,
    loaded: &'o Loaded,
}

impl ObjectRef<'_, '_> {
    /// Which object.
    #[must_use]
    pub fn object(&self) -> &ObjectData {
        &self.loaded.object
    }

    /// Bytes of its data and bss.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.loaded.object.range.end - self.loaded.object.range.start
    }

    /// Its data, as it was when it was first requested.
    #[must_use]
    pub fn data(&self) -> Rc<Data> {
        if let Some(data) = self.loaded.data.get() {
            return Rc::clone(data);
        }
        let data = Rc::new(Data::read(self.all.memory, self.loaded.object.range.clone()));
        let kept = self.all.kept_bytes.get().saturating_add(data.len() as u64);
        if kept <= DATA_KEPT_BYTES_MAX && self.loaded.data.set(Rc::clone(&data)).is_ok() {
            self.all.kept_bytes.set(kept);
        }
        data
    }

    /// Its build id, if its headers can be read.
    #[must_use]
    pub fn build_id(&self) -> Option<BuildId> {
        self.loaded.build_id.get_or_init(|| self.loaded.object.build_id(self.all.memory)).clone()
    }
}

/// Finds the objects' data: private writable file mappings with the anonymous mapping right behind them. glibc comes first, as the most
/// likely owner of a heap.
#[must_use]
pub fn objects(maps: &Maps) -> Vec<ObjectData> {
    let mut found: Vec<ObjectData> = Vec::new();
    let mut base = (None, 0u64);
    let mut mappings = maps.mappings.iter().peekable();
    while let Some(mapping) = mappings.next() {
        let Some(path) = mapping.path() else { continue };
        if mapping.offset.0 == 0 && !mapping.permissions.write {
            base = (Some(mapping.inode), mapping.start.0);
        }
        if !is_private_data(mapping) || found.len() >= OBJECTS_MAX || path.starts_with("/anon_hugepage") {
            continue;
        }
        let (start, mut end) = (mapping.start.0, mapping.end.0);
        while let Some(next) = mappings.peek() {
            let continues = next.start.0 == end
                && is_private_data(next)
                && match &next.backing {
                    Backing::Anonymous => true,
                    Backing::Named(name) => name == "[anon:.bss]",
                    Backing::File { .. } => next.inode == mapping.inode,
                };
            if !continues || end - start > OBJECT_BYTES_MAX {
                break;
            }
            end = next.end.0;
            mappings.next();
        }
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let base = if base.0 == Some(mapping.inode) { base.1 } else { start };
        found.push(ObjectData { range: start..end.min(start.saturating_add(OBJECT_BYTES_MAX)), base, name });
    }
    found.sort_by_key(|object| !(object.name.starts_with("libc.so") || object.name.starts_with("libc-2.")));
    found
}

fn is_private_data(mapping: &crate::process::Mapping) -> bool {
    let allowed = mapping.permissions;
    allowed.read && allowed.write && !allowed.shared
}

impl ObjectData {
    /// The build id that the loaded object carries, from its mapped headers.
    #[must_use]
    pub fn build_id(&self, memory: &dyn Memory) -> Option<BuildId> {
        Elf::parse(MappedHeaders { memory, base: self.base }).ok()?.build_id()
    }
}

/// Reads a range of bounded size; what is not present (never touched, swapped out, unreadable) is zero.
#[must_use]
pub fn read_present(memory: &dyn Memory, range: Range<u64>) -> Vec<u8> {
    read_pages(memory, range).0
}

/// As [`read_present`], with the parts that were read.
fn read_pages(memory: &dyn Memory, range: Range<u64>) -> (Vec<u8>, Vec<Range<usize>>) {
    let length = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
    let mut out = vec![0u8; length];
    let mut parts = Vec::new();
    let Ok(runs) = memory.page_runs(range.clone()) else { return (out, parts) };
    for run in runs.within(range.clone()).filter(|run| run.state.present) {
        let from = usize::try_from(run.start - range.start).unwrap_or(length);
        let to = usize::try_from(run.end - range.start).unwrap_or(length);
        if let Some(part) = out.get_mut(from..to) {
            let bytes = part.len();
            memory.read_pieces(&[Piece { addr: run.start, bytes }], part);
            parts.push(from..to);
        }
    }
    (out, parts)
}

/// The start of a mapped file, where file offsets and distances from the first mapping are the same.
struct MappedHeaders<'a> {
    memory: &'a dyn Memory,
    base: u64,
}

impl ReadAt for MappedHeaders<'_> {
    fn length(&self) -> std::io::Result<u64> {
        Ok(HEADER_BYTES_MAX)
    }

    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        let wanted = out.len() as u64;
        let inside = offset.checked_add(wanted).is_some_and(|end| end <= HEADER_BYTES_MAX);
        if inside && self.memory.read(self.base.wrapping_add(offset), out) as u64 == wanted {
            return Ok(());
        }
        Err(std::io::ErrorKind::UnexpectedEof.into())
    }
}

/// The private anonymous writable mappings: where heaps can be. Stacks of threads are among them, the main stack is not.
#[must_use]
pub fn anonymous_ranges(maps: &Maps) -> Vec<Range<u64>> {
    maps.mappings
        .iter()
        .filter(|mapping| is_private_data(mapping) && !mapping.permissions.execute && mapping.len() >= page_bytes())
        .filter(|mapping| match &mapping.backing {
            Backing::Anonymous => true,
            Backing::Named(name) => name == "[heap]" || name.starts_with("[anon:"),
            Backing::File { path, .. } => path.starts_with("/anon_hugepage"),
        })
        .map(|mapping| mapping.start.0..mapping.end.0)
        .collect()
}

/// The private mappings without a file, whatever their rights, joined: allocators reserve without rights and open later. Bss and the
/// mappings next to it are among them.
#[must_use]
pub fn unbacked_ranges(maps: &Maps) -> Vec<Range<u64>> {
    let ranges: Vec<Range<u64>> = maps
        .mappings
        .iter()
        .filter(|mapping| !mapping.permissions.shared && mapping.path().is_none_or(|path| path.starts_with("/anon_hugepage")))
        .map(|mapping| mapping.start.0..mapping.end.0)
        .collect();
    joined(&ranges)
}

/// Where the thread-local storage of any thread can be: the private writable mappings. That of the first thread is often in the rest of the
/// last page of the dynamic linker's own data (`__minimal_malloc`, elf/dl-minimal-malloc.c of glibc), which is mapped from its file: pages of
/// 16 or 64 KiB have room for it.
#[must_use]
pub fn thread_ranges(maps: &Maps) -> Vec<Range<u64>> {
    maps.mappings.iter().filter(|mapping| is_private_data(mapping)).map(|mapping| mapping.start.0..mapping.end.0).collect()
}

/// The ranges joined where they touch or overlap; they must be sorted by start.
#[must_use]
pub fn joined(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match out.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => out.push(range.clone()),
        }
    }
    out
}

/// The sorted, disjoint range that contains `addr`.
#[must_use]
pub fn range_of(ranges: &[Range<u64>], addr: u64) -> Option<&Range<u64>> {
    let after = ranges.partition_point(|range| range.start <= addr);
    ranges.get(after.checked_sub(1)?).filter(|range| range.contains(&addr))
}

/// The ranges without what `taken` covers; both sorted, `taken` disjoint.
#[must_use]
pub fn without(ranges: &[Range<u64>], taken: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut out = Vec::new();
    for range in ranges {
        let mut at = range.start;
        let first = taken.partition_point(|other| other.end <= range.start);
        for other in taken.get(first..).unwrap_or_default().iter().take_while(|other| other.start < range.end) {
            if other.start > at {
                out.push(at..other.start);
            }
            at = at.max(other.end);
        }
        if at < range.end {
            out.push(at..range.end);
        }
    }
    out
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges are meant")]
mod tests {
    use super::*;

    #[test]
    fn filled_words_are_counted_across_blocks() {
        let mut bytes = vec![0u8; 8 * 4 * BLOCK_WORDS];
        let filled = [0usize, 5, 511, 512, 513, 1500, 2047];
        for number in filled {
            if let Some(byte) = bytes.get_mut(8 * number) {
                *byte = 1;
            }
        }
        let present = vec![0..bytes.len()];
        let data = Data { bytes, present, filled: OnceCell::new() };
        assert_eq!(data.words().map(|(number, _)| number).collect::<Vec<_>>(), filled);
        for start in [0, 1, 5, 6, 511, 512, 600, 1024, 2047] {
            for end in [start, start + 1, 512, 513, 1024, 1501, 2047, 2048] {
                let count = filled.iter().filter(|&&number| number >= start && number < end).count();
                for max in 0..8 {
                    assert_eq!(end >= start && data.has_more_filled(start..end, max), count > max, "{start}..{end}, {max}");
                }
            }
        }
    }

    #[test]
    fn ranges_are_joined_subtracted_and_found() {
        assert_eq!(joined(&[0..4, 4..6, 8..9]), [0..6, 8..9]);
        assert_eq!(without(&[0..10, 20..30], &[2..4, 8..22, 29..40]), [0..2, 4..8, 22..29]);
        assert_eq!(range_of(&[0..6, 8..9], 8), Some(&(8..9)));
        assert_eq!(range_of(&[0..6, 8..9], 6), None);
    }
}
