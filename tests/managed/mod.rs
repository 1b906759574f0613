//! Frames of managed runtimes, against what the runtimes themselves say.

mod java;
mod life;
mod node;
pub mod python;
mod python_life;
mod python_truth;
mod truth;
