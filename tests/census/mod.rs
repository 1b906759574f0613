//! The census against the allocators' own accounts.
#![allow(clippy::unwrap_used)]

mod glibc;
mod others;
mod target;
