//! Frames of managed runtimes, against what the runtimes themselves say.

mod cost;
pub mod java;
mod life;
mod memory;
mod node;
mod proofs;
pub mod python;
mod python_life;
mod python_objects;
pub mod python_truth;
mod rocksdb;
pub mod truth;
