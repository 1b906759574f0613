//! The live view of `fragprof top`.
