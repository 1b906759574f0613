//! The preload sampler: its samples compared with programs' own ledgers, its effect on programs, and its cost.
//!
//! The consumer here is libbpf's own USDT support (`usdt_test.bpf.c`), not fragprof's: it finds the notes, decodes the arguments and keeps
//! the semaphores exactly as the format specifies.

mod by_site;
mod command;
pub(crate) mod consumer;
pub(crate) mod exact;
mod figures;
mod library;
mod limit;
pub(crate) mod programs;
mod real;
mod statistics;
mod stress;
mod systemd;
