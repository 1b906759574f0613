//! The integration tests: one binary, so that the library is linked once. Each module tests one part against an independent source.
#![allow(clippy::unwrap_used)]

mod agent;
mod attach;
mod attribution;
mod census;
mod ci;
mod containers;
mod emitter;
mod faults;
mod governed;
mod in_process;
mod layers;
mod leaks;
mod managed;
mod matrix;
mod pages;
mod placement;
mod profile;
mod record;
mod sampler;
mod selective;
mod support;
mod surfaces;
mod top;
mod trim;
mod truth;
mod unwind;
mod verdicts;
mod whatif;
