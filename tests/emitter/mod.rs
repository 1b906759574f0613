//! The consumer of emitters: what fragprof makes of what a program tells of its own allocations, against what the program knows, the
//! allocator's account, and the kernel's count of listeners.

mod agent;
mod databases;
mod figures;
mod foreign;
mod heap;
mod listening;
mod programs;
mod pushes;
mod real;
mod report;
mod session;
mod statistics;
mod workloads;
