//! The ways to watch a process: when its probes are attached, and what may be concluded from their records.

pub mod exact;
pub mod in_process;
pub mod sampled;
pub mod windows;
