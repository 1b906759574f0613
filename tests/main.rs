//! The integration tests: one binary, so that the library is linked once. Each module tests one part against somebody else's truth.
#![allow(clippy::unwrap_used)]

mod census;
mod placement;
mod record;
mod sampler;
mod support;
mod unwind;
