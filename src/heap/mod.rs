//! Address ranges of a heap: extents, residency and per-page occupancy. Pure, fed by snapshots and events.
//!
//! | file | job |
//! |---|---|
//! | [`ranges`] | disjoint address ranges with a value each |
//! | [`extents`] | which mappings are heap, kept up to date by events |
//! | [`occupancy`] | what lies on each page |

pub mod extents;
pub mod occupancy;
pub mod ranges;
