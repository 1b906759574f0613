//! Frames of managed runtimes, against what the runtimes themselves say.

mod java;
mod life;
mod truth;
