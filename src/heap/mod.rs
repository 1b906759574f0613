//! Address ranges of a heap: extents, residency and per-page occupancy. Pure, fed by snapshots and events.
//!
//! | file | job |
//! |---|---|
//! | [`ranges`] | disjoint address ranges with a value each |
//! | [`extents`] | which mappings are heap, kept up to date by events |
//! | [`footprint`] | what an allocator adds to a block |
//! | [`pages`] | spans of bytes cut at page ends: what lies on each page, and whose it is |

pub mod extents;
pub mod footprint;
pub mod pages;
pub mod ranges;
