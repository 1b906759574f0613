//! The unwinder against other unwinders: gimli's full evaluation and framehop on recorded stacks, gdb on live ones.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod arm64;
mod host;
mod hotspot;
mod lab;
mod live;
mod oracle;
mod python;
mod recorded;
mod recording;
