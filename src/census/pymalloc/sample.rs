//! Live and free bytes of random pools: the same time for heaps of any size, with a stated error.

use super::super::account::OccupancyEstimate;
use super::super::chunks::ChunkState;
use super::super::memory::Memory;
use super::super::pace::Pacer;
use super::super::page_cache::PageCache;
use super::arenas::{Arena, Arenas};
use super::{PoolReader, Read};
use crate::heap::occupancy::OccupancyBuilder;
use crate::random::Random;

/// Pools read for each window of a sample: a pool says less than 64 KiB of glibc's heap, two of them as much.
const POOLS_A_WINDOW: u64 = 2;

/// The estimate.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Estimate {
    /// Live bytes.
    pub live_bytes_est: u64,
    /// Standard error.
    pub live_bytes_stderr: u64,
    /// Contents of the resident pages.
    pub occupancy: OccupancyEstimate,
    /// Pools read.
    pub pools: u64,
    /// Pools that could not be read, or contradict themselves.
    pub lost: u64,
}

/// Reads pools that were used at some time, drawn with equal chances; all of them if they are few.
#[must_use]
pub fn estimate(memory: &dyn Memory, arenas: &Arenas, mut pacer: Pacer) -> Estimate {
    let form = arenas.form;
    let begun = |arena: &Arena| (arena.pool_address - arena.first_pool(form)) / form.pool_bytes;
    // Pools before each arena's.
    let mut before: Vec<u64> = Vec::with_capacity(arenas.list.len());
    let mut all = 0u64;
    for arena in &arenas.list {
        before.push(all);
        all = all.saturating_add(begun(arena));
    }
    let wanted = pacer.sample_windows().saturating_mul(POOLS_A_WINDOW);
    let mut reader = PoolReader::new(PageCache::without_foresight(memory), form.pool_bytes, 0);
    let mut random = Random::new(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |now| now.as_nanos() as u64));
    // Equal parts, with one drawn from each.
    let step = (all / wanted.max(1)).max(1);
    let (mut live, mut free, mut pinned, mut estimate) = (Vec::new(), Vec::new(), 0.0, Estimate::default());
    for first in (0..all).step_by(usize::try_from(step).unwrap_or(1)) {
        if pacer.is_over() {
            break;
        }
        let number = first + random.bits() % step.min(all - first);
        let at = before.partition_point(|&count| count <= number).saturating_sub(1);
        let Some((arena, count)) = arenas.list.get(at).zip(before.get(at)) else { continue };
        let addr = arena.first_pool(form) + (number - count) * form.pool_bytes;
        pacer.read(form.pool_bytes);
        if reader.read(addr, arena.number, 0) != Read::Sound {
            estimate.lost += 1;
            continue;
        }
        let PoolReader { pages, chunks, .. } = &mut reader;
        let mut builder = OccupancyBuilder::new(|range| pages.resident_bytes(range));
        let mut start = addr;
        for &(bytes, state) in &*chunks {
            builder.add(start..start + bytes, state.holder());
            start += bytes;
        }
        let occupancy = builder.finish();
        let in_use = chunks.iter().filter(|(_, state)| *state == ChunkState::Live).map(|(bytes, _)| bytes).sum::<u64>();
        live.push(in_use as f64);
        free.push((occupancy.pinned_bytes + occupancy.free_unpinned_bytes) as f64);
        pinned += occupancy.pinned_bytes as f64;
    }
    estimate.pools = live.len() as u64;
    let (count, all) = (live.len() as f64, all as f64);
    let ((live, live_error), (free, free_error)) = (total(&live, all), total(&free, all));
    // A lost pool may be all live or all free.
    let lost = estimate.lost as f64 / (count + estimate.lost as f64).max(1.0) * all * form.pool_bytes as f64;
    estimate.live_bytes_est = live as u64;
    estimate.live_bytes_stderr = (live_error + lost) as u64;
    estimate.occupancy = OccupancyEstimate {
        free_resident_bytes_est: free as u64,
        free_resident_bytes_stderr: (free_error + lost) as u64,
        // No call returns pages of an arena that has blocks in use.
        trimmable_bytes_est: 0,
        pinned_bytes_est: (pinned / count.max(1.0) * all) as u64,
        cached_bytes_est: 0,
    };
    estimate
}

/// The sum over `all` of which these are drawn, with its standard error.
fn total(values: &[f64], all: f64) -> (f64, f64) {
    let count = values.len() as f64;
    if count < 1.0 {
        return (0.0, 0.0);
    }
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / (count - 1.0).max(1.0);
    let unread = (1.0 - count / all.max(1.0)).max(0.0);
    (mean * all, all * (variance / count * unread).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_of_all_has_no_error_and_one_of_a_few_has_that_of_their_spread() {
        assert_eq!(total(&[1.0, 3.0], 2.0), (4.0, 0.0));
        let (sum, error) = total(&[1.0, 3.0], 200.0);
        assert_eq!(sum, 400.0);
        assert!((error - 200.0 * 0.99f64.sqrt()).abs() < 1e-9, "{error}");
        assert_eq!(total(&[], 10.0), (0.0, 0.0));
    }
}
