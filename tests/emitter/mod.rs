//! The consumer of emitters: what fragprof derives from a program's samples, compared with the program's own account, the
//! allocator's account, and the kernel's count of listeners.

mod agent;
mod databases;
mod figures;
mod foreign;
mod heap;
mod listening;
pub mod programs;
mod pushes;
mod real;
pub(crate) mod report;
mod session;
mod statistics;
pub(crate) mod strata;
pub(crate) mod workloads;
