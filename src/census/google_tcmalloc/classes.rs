//! The size classes, by the central free lists, and the transfer caches in front of them.
//!
//! `TransferCacheManager` (tcmalloc/transfer_cache.h) has a `TransferCache` for each size class, one behind the other, in the library's data;
//! each ends with its `CentralFreeList`: {…, slot_info: used and capacity, 32 bits each; slots; lock; size_class; object_size;
//! objects_per_span, of 32 bits beside another number since 2026-07; …; pages_per_span} (transfer_cache_internals.h since 2023-12,
//! central_freelist.h). The table is found by its form: classes
//! that count up at equal distances, and objects that fill their spans.

use std::collections::BTreeMap;

use super::super::memory::{Memory, word_at, word32_at};
use super::super::objects::{Data, ObjectData};

/// Size classes of a build: 8 KiB pages have 172, with NUMA nodes 258.
const CLASSES_MAX: usize = 1024;
/// Largest object of a size class (`kMaxSize`), with room for other builds.
const OBJECT_BYTES_MAX: u64 = 1 << 20;
/// Pages of a span with small objects.
const PAGES_MAX: u64 = 64;
/// Distance between two of the table's records.
const STRIDES: std::ops::RangeInclusive<u64> = 128..=8192;
/// Classes that must be in order.
const CLASSES_MIN: usize = 8;
/// Where the pages of a span are, in bytes behind `size_class`: other numbers are before them, more in later releases.
const PAGES_AT: [usize; 4] = [24, 32, 40, 48];
/// Objects in a transfer cache: 64 batches of 128.
const TRANSFER_MAX: u32 = 1 << 16;

/// A size class.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Class {
    /// Bytes of an object; 0 if the class is not used.
    pub bytes: u64,
    /// Objects of a span.
    pub objects: u64,
    /// Pages of a span.
    pub pages: u64,
}

/// The size classes of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Classes {
    /// By number; the first is none.
    pub list: Vec<Class>,
    /// Place of `size_class` of class 0, and the distance to that of the next one.
    first: u64,
    stride: u64,
}

/// A transfer cache: its slots and how many of them are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransferCache {
    /// Number of its size class.
    pub class: u16,
    /// Address of its array of objects.
    pub slots: u64,
    /// Objects in it.
    pub used: u64,
}

impl Classes {
    /// Finds the table in an object's data.
    #[must_use]
    pub fn find(object: &ObjectData, data: &Data, page_bits: u32) -> Option<Self> {
        let candidates = data.words().filter_map(|(number, word)| {
            let class = usize::try_from(word).ok().filter(|class| (1..CLASSES_MAX).contains(class))?;
            PAGES_AT.into_iter().find_map(|pages_at| class_at(data, 8 * number, page_bits, pages_at))?;
            Some((8 * number as u64, class as u64))
        });
        let mut votes: BTreeMap<(u64, u64), usize> = BTreeMap::new();
        let mut before: Option<(u64, u64)> = None;
        for (at, class) in candidates {
            if let Some((from, number)) = before.filter(|(_, number)| *number < class) {
                let (bytes, steps) = (at - from, class - number);
                let stride = bytes / steps;
                if bytes.is_multiple_of(steps) && STRIDES.contains(&stride) && stride * class <= at {
                    *votes.entry((at - stride * class, stride)).or_default() += 1;
                }
            }
            before = Some((at, class));
        }
        let ((first, stride), count) = votes.into_iter().max_by_key(|(_, count)| *count)?;
        let place = |class: usize| usize::try_from(first + stride * class as u64).ok();
        let places: Vec<usize> =
            (0..CLASSES_MAX).map_while(|class| place(class).filter(|&at| class == 0 || word_at(data, at) == class as u64)).collect();
        // Of some classes another number would do, but not of all.
        let lists = PAGES_AT.map(|pages_at| -> Vec<Class> {
            let classes = places.iter().map(|&at| class_at(data, at, page_bits, pages_at).unwrap_or_default());
            classes.enumerate().map(|(class, found)| if class == 0 { Class::default() } else { found }).collect()
        });
        let list = lists.into_iter().max_by_key(|list| list.iter().filter(|class| class.bytes > 0).count())?;
        (count >= CLASSES_MIN).then_some(Self { list, first: object.range.start + first, stride })
    }

    /// The class with a number, if it has objects.
    #[must_use]
    pub fn get(&self, class: u16) -> Option<&Class> {
        self.list.get(usize::from(class)).filter(|class| class.bytes > 0)
    }

    /// The transfer caches as they are now; `None` if these are not the places of any.
    #[must_use]
    pub fn transfer_caches(&self, memory: &dyn Memory, is_mapped: impl Fn(u64) -> bool) -> Option<Vec<TransferCache>> {
        /// Before `size_class`: slot_info, slots, lock.
        const BEFORE: u64 = 24;
        let start = self.first.checked_sub(BEFORE)?;
        let bytes = memory.bytes(start, usize::try_from(self.stride * self.list.len() as u64).ok()?)?;
        let records = bytes.chunks_exact(usize::try_from(self.stride).ok()?);
        let mut found = Vec::with_capacity(self.list.len());
        for ((number, _), record) in (0u16..).zip(&self.list).zip(records).filter(|((_, class), _)| class.bytes > 0) {
            let (used, capacity, slots) = (word32_at(record, 0), word32_at(record, 4), word_at(record, 8));
            let is_sound = used <= capacity && capacity <= TRANSFER_MAX && slots.is_multiple_of(8) && is_mapped(slots);
            if !is_sound && (slots, capacity) != (0, 0) {
                return None;
            }
            found.push(TransferCache { class: number, slots, used: used.into() });
        }
        Some(found)
    }
}

/// The class whose `size_class` is at a place of the data, if the pages of its spans are `pages_at` bytes behind it.
fn class_at(data: &[u8], at: usize, page_bits: u32, pages_at: usize) -> Option<Class> {
    let (bytes, objects, pages) = (word_at(data, at + 8), u64::from(word32_at(data, at + 16)), word_at(data, at + pages_at));
    let is_object = (8..=OBJECT_BYTES_MAX).contains(&bytes) && bytes.is_multiple_of(8);
    let is_sound = is_object && (1..PAGES_MAX).contains(&pages) && objects > 0 && (pages << page_bits) / bytes == objects;
    is_sound.then_some(Class { bytes, objects, pages })
}
