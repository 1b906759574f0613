//! Blocks without pointers, compared with programs that list theirs.
#![allow(clippy::unwrap_used)]

mod agent;
mod command;
mod hostile;
mod join;
mod memcheck;
mod owners;
mod real;
mod target;
mod truth;
