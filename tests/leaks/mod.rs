//! Blocks without pointers against programs that know theirs.
#![allow(clippy::unwrap_used)]

mod target;
mod truth;
