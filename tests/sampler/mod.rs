//! The preload sampler: what its probes tell against programs' own ledgers, that programs do not notice it, and what it costs.
//!
//! The consumer here is libbpf's own USDT support (`usdt_test.bpf.c`), not fragprof's: it finds the notes, decodes the arguments and keeps
//! the semaphores by the format's letter.

mod command;
mod consumer;
mod exact;
mod figures;
mod library;
mod limit;
mod programs;
mod real;
mod statistics;
mod stress;
