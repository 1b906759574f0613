//! A heap's figures and its address ranges: ladder, extents, residency and per-page occupancy. Pure, fed by snapshots and events.
//!
//! | file | job |
//! |---|---|
//! | [`ladder`] | extent, resident, live, and the free part by kind, for everybody above |
//! | [`ranges`] | disjoint address ranges, each with a value |
//! | [`extents`] | which mappings are heap, kept up to date by events |
//! | [`overlaid`] | ranges mapped again before their unmapping was recorded |
//! | [`space`] | the mappings, from records in the order in which the calls returned |
//! | [`pages`] | spans of bytes cut at page ends: the contents of each page by owner |
//! | [`occupancy`] | live, cached and free bytes of each page of a census |
//! | [`residency`] | which pages are in RAM, swapped out or huge |

pub mod extents;
pub mod ladder;
pub mod occupancy;
pub mod overlaid;
pub mod pages;
pub mod ranges;
pub mod residency;
pub mod space;
