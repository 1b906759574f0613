//! The code cache: its heaps, and the blob that an address lies in.

use super::layout::Layout;
use crate::bpf::HOTSPOT_HEAD_BYTES;
use crate::census::Memory;
use crate::census::memory::{is_user_address, word_at, word32_at};

/// Heaps of a code cache: HotSpot has three.
const HEAPS_MAX: u32 = 8;
/// The largest code cache that HotSpot allows, 2 GiB (`CODE_CACHE_SIZE_LIMIT`).
const CACHE_BYTES_MAX: u64 = 2 << 30;
/// Tags that are followed to the begin of a block.
const HOPS_MAX: usize = 64;
/// Tag of a free segment.
const FREE: u8 = 0xff;
/// Longest name of a blob.
const NAME_BYTES_MAX: usize = 128;
/// Most blobs that are visited to find those with certain names: a large service has some 30,000.
const BLOBS_MAX: usize = 100_000;

/// A heap of the code cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heap {
    /// First address of the reservation.
    pub begin: u64,
    /// First address after it.
    pub end: u64,
    /// First byte of the segment map.
    pub segments: u64,
    /// Log2 of a segment's bytes.
    pub shift: u32,
}

/// Generated code with a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blob {
    /// Its address.
    pub address: u64,
    /// First address of the code.
    pub begin: u64,
    /// First address after it.
    pub end: u64,
    /// Address of its name.
    pub name: u64,
    /// Words of its frame.
    pub frame_words: u32,
}

/// The heaps as they are now; empty before the JVM has made them.
pub fn heaps(memory: &dyn Memory, layout: &Layout) -> Vec<Heap> {
    let addresses = layout.heaps.addresses(memory, HEAPS_MAX);
    let mut heaps = addresses.into_iter().map(|address| heap(memory, layout, address)).collect::<Option<Vec<Heap>>>().unwrap_or_default();
    heaps.sort_by_key(|heap| heap.begin);
    let are_apart = heaps.windows(2).all(|pair| matches!(pair, [one, next] if one.end <= next.begin));
    if are_apart { heaps } else { Vec::new() }
}

fn heap(memory: &dyn Memory, layout: &Layout, heap: u64) -> Option<Heap> {
    let word = |part: u64, field: u64| memory.word(heap.wrapping_add(part).wrapping_add(field));
    let found = Heap {
        begin: word(layout.heap_memory, layout.space_low)?,
        end: word(layout.heap_memory, layout.space_high)?,
        segments: word(layout.heap_segments, layout.space_low)?,
        shift: word32(memory, heap.wrapping_add(layout.heap_segment_shift))?,
    };
    let is_sound = is_user_address(found.begin)
        && is_user_address(found.end)
        && found.begin < found.end
        && found.end - found.begin <= CACHE_BYTES_MAX
        && is_user_address(found.segments)
        && (3..20).contains(&found.shift);
    is_sound.then_some(found)
}

/// The blob that covers an address.
pub fn blob_of(memory: &dyn Memory, layout: &Layout, heaps: &[Heap], pc: u64) -> Option<Blob> {
    let heap = heaps.iter().find(|heap| (heap.begin..heap.end).contains(&pc))?;
    let mut segment = (pc - heap.begin) >> heap.shift;
    for _ in 0..HOPS_MAX {
        let mut tag = [FREE];
        if memory.read(heap.segments.wrapping_add(segment), &mut tag) != 1 || tag == [FREE] {
            return None;
        }
        if tag == [0] {
            let address = heap.begin.wrapping_add(segment << heap.shift).wrapping_add(layout.heap_block_bytes);
            return blob_at(memory, layout, address).filter(|blob| (blob.begin..blob.end).contains(&pc) && blob.address < pc);
        }
        segment = segment.checked_sub(u64::from(tag[0]))?;
    }
    None
}

fn blob_at(memory: &dyn Memory, layout: &Layout, address: u64) -> Option<Blob> {
    let head = memory.bytes(address, HOTSPOT_HEAD_BYTES as usize)?;
    let at = |field: u64| usize::try_from(field).unwrap_or(usize::MAX);
    let place = |field: u64| match layout.relative {
        true => address.wrapping_add(u64::from(word32_at(&head, at(field)))),
        false => word_at(&head, at(field)),
    };
    Some(Blob {
        address,
        begin: place(layout.blob_code_begin),
        end: place(layout.blob_code_end),
        name: word_at(&head, at(layout.blob_name)),
        frame_words: word32_at(&head, at(layout.blob_frame_size)),
    })
}

/// Visits the blobs of a heap, from the first one on, until `visit` returns `false`.
pub fn for_each(memory: &dyn Memory, layout: &Layout, heap: &Heap, mut visit: impl FnMut(&Blob) -> bool) {
    let mut at = heap.begin;
    for _ in 0..BLOBS_MAX {
        if at >= heap.end {
            return;
        }
        // `HeapBlock::Header`: length in segments, and whether it is in use; 64 and 8 bits, from JDK 25 on 32 and 8.
        let Some(header) = memory.bytes(at, 16) else { return };
        let (segments, is_used) = match layout.heap_block_bytes {
            8 => (u64::from(word32_at(&header, 0)), word32_at(&header, 4) & 0xff != 0),
            _ => (word_at(&header, 0), word32_at(&header, 8) & 0xff != 0),
        };
        if segments == 0 || segments > (heap.end - heap.begin) >> heap.shift {
            return;
        }
        if is_used
            && let Some(blob) = blob_at(memory, layout, at.wrapping_add(layout.heap_block_bytes))
            && !visit(&blob)
        {
            return;
        }
        at = at.saturating_add(segments << heap.shift);
    }
}

/// The text at an address, up to the first 0 or the limit.
pub fn text_at(memory: &dyn Memory, address: u64) -> Option<String> {
    if !is_user_address(address) {
        return None;
    }
    let mut bytes = [0; NAME_BYTES_MAX];
    let got = memory.read(address, &mut bytes);
    let text = bytes.get(..got)?;
    let end = text.iter().position(|&byte| byte == 0)?;
    Some(String::from_utf8_lossy(text.get(..end)?).into_owned())
}

/// The 32-bit number at an address.
pub fn word32(memory: &dyn Memory, address: u64) -> Option<u32> {
    memory.bytes(address, 4).map(|bytes| word32_at(&bytes, 0))
}
