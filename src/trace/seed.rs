//! The heap from before a recording: the blocks in use and the free chunks between them, as a census at the beginning saw them. Pure.
//!
//! A replay makes the blocks before the first event, by arena and ascending address. Free chunks are made too and freed again, so that the
//! heap has its holes.
//!
//! ```text
//! region = arena + 1, address, number of chunks, chunks      all numbers LEB128
//! chunk  = distance from the end of the chunk before << 1 | is free, usable bytes, resident bytes if it is free
//! ```

use super::codec::{Bytes, put};

/// Chunks that one chunk of the trace has at most: some 4 MiB, 32 MiB when decoded.
pub const SEED_CHUNKS: usize = 1 << 20;

/// A chunk of a heap from before the recording.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeedChunk {
    /// The address that the allocator returned, or would return.
    pub addr: u64,
    /// Bytes that a program may use there.
    pub usable_bytes: u64,
    /// Resident bytes of a free chunk; `None` for a block in use.
    pub free: Option<u64>,
}

/// Chunks of one arena by ascending address.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct SeedRegion {
    /// The arena, in the census's order; `None` for blocks with a mapping of their own.
    pub arena: Option<u32>,
    /// Its chunks; at least one.
    pub chunks: Vec<SeedChunk>,
}

impl SeedRegion {
    /// The addresses that it spans; empty if it has no chunks.
    #[must_use]
    pub fn range(&self) -> std::ops::Range<u64> {
        let end = self.chunks.last().map_or(0, |last| last.addr.saturating_add(last.usable_bytes));
        self.chunks.first().map_or(0, |first| first.addr)..end
    }

    /// Appends its bytes. Chunks that are not after the one before are left out.
    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, self.arena.map_or(0, |arena| u64::from(arena) + 1));
        let begin = self.range().start;
        put(out, begin);
        let (mut at, mut count, mut chunks) = (begin, 0, Vec::new());
        for chunk in &self.chunks {
            let Some(distance) = chunk.addr.checked_sub(at).filter(|distance| *distance < 1 << 63) else { continue };
            put(&mut chunks, distance << 1 | u64::from(chunk.free.is_some()));
            put(&mut chunks, chunk.usable_bytes);
            if let Some(resident_bytes) = chunk.free {
                put(&mut chunks, resident_bytes);
            }
            at = chunk.addr.saturating_add(chunk.usable_bytes);
            count += 1;
        }
        put(out, count);
        out.extend_from_slice(&chunks);
    }

    /// The next region.
    ///
    /// # Errors
    /// What is wrong with the bytes.
    pub fn decode(bytes: &mut Bytes<'_>) -> Result<Self, &'static str> {
        const CUT: &str = "a region of the seed is cut";
        let arena = bytes.number().ok_or(CUT)?;
        let arena = match arena.checked_sub(1) {
            None => None,
            Some(arena) => Some(u32::try_from(arena).map_err(|_| "an arena's number is too large")?),
        };
        let (mut at, count) = (bytes.number().ok_or(CUT)?, bytes.number().ok_or(CUT)?);
        // Each takes two bytes at least.
        if count == 0 || count > (bytes.0.len() as u64 / 2).min(SEED_CHUNKS as u64) {
            return Err("a region of the seed has no chunks, or too many");
        }
        let mut region = Self { arena, chunks: Vec::with_capacity(count as usize) };
        for _ in 0..count {
            let (distance, usable_bytes) = (bytes.number().ok_or(CUT)?, bytes.number().ok_or(CUT)?);
            let free = if distance & 1 == 1 { Some(bytes.number().ok_or(CUT)?) } else { None };
            let addr = at.checked_add(distance >> 1).ok_or("a chunk of the seed is beyond the address space")?;
            at = addr.checked_add(usable_bytes).ok_or("a chunk of the seed is beyond the address space")?;
            region.chunks.push(SeedChunk { addr, usable_bytes, free });
        }
        Ok(region)
    }
}

/// A heap's regions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seed {
    /// By address.
    pub regions: Vec<SeedRegion>,
}

impl Seed {
    /// The blocks in use and the free chunks.
    pub fn chunks(&self) -> impl Iterator<Item = &SeedChunk> {
        self.regions.iter().flat_map(|region| &region.chunks)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;

    fn region() -> impl Strategy<Value = SeedRegion> {
        let chunk = (8u64..64, 1u64..100_000, proptest::option::of(0u64..100_000));
        (proptest::option::of(0u32..50), any::<u32>(), proptest::collection::vec(chunk, 1..40)).prop_map(|(arena, begin, chunks)| {
            let mut at = u64::from(begin) << 8;
            let chunks = chunks.into_iter().map(|(distance, usable_bytes, free)| {
                let chunk = SeedChunk { addr: at + distance, usable_bytes, free };
                at = chunk.addr + usable_bytes;
                chunk
            });
            SeedRegion { arena, chunks: chunks.collect() }
        })
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(regions in proptest::collection::vec(region(), 0..5)) {
            let mut out = Vec::new();
            regions.iter().for_each(|region| region.encode(&mut out));
            let mut bytes = Bytes(&out);
            let decoded: Vec<SeedRegion> = std::iter::from_fn(|| (!bytes.0.is_empty()).then(|| SeedRegion::decode(&mut bytes).unwrap())).collect();
            prop_assert_eq!(decoded, regions);
        }

        #[test]
        fn any_bytes_are_a_region_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = Bytes(&bytes);
            if let Ok(region) = SeedRegion::decode(&mut bytes) {
                prop_assert!(region.chunks.windows(2).all(|pair| pair[0].addr <= pair[1].addr));
            }
        }
    }
}
