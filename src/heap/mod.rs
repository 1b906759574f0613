//! Address ranges of a heap: extents, residency and per-page occupancy. Pure, fed by snapshots and events.

pub mod occupancy;
pub mod residency;
