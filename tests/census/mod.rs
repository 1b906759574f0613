//! The census against the allocators' own accounts.
#![allow(clippy::unwrap_used)]

mod cost;
mod glibc;
mod google_tcmalloc;
mod hostile;
mod mimalloc;
pub(crate) mod others;
mod postgres;
mod proof;
mod python;
mod running;
mod runtimes;
mod suites;
pub mod target;
