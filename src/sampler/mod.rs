//! The preload library that samples allocations inside a program, and what it takes to start a program with it.
//!
//! ```text
//! preload/*.c ──build.rs──► two libraries, embedded here
//! fit      may this program run with it, and with which of the two
//! library  puts the library where the dynamic linker of any program finds it
//! ```
//!
//! The library (C, needs nothing, the same file under glibc and musl) stands in front of whatever allocator the program uses. Each byte
//! that a thread allocates is a sample point with probability 1/T (512 KiB by default); at a sampled allocation, and at the free of
//! that block, it passes a probe of the `otel_memory` contract (OpenTelemetry eBPF profiler, design document 00003):
//!
//! | probe | arguments, in rdi, rsi, rdx |
//! |---|---|
//! | `otel_memory:alloc` | pointer, size in bytes, weight in bytes = sample points × T |
//! | `otel_memory:free` | pointer |
//!
//! Both have semaphores. While nobody is attached, a call costs a load, a test and a jump.

pub mod fit;
pub mod library;

/// The environment variable that holds the mean distance of sample points in bytes. Read once, at a program's start.
pub const SAMPLE_BYTES_VARIABLE: &str = "FRAGPROF_SAMPLE_BYTES";
/// The library's default distance. `SAMPLE_BYTES_DEFAULT` of preload/sample.h.
pub const SAMPLE_BYTES_DEFAULT: u64 = 512 << 10;
/// The smallest distance that the library takes: every allocation is sampled. `SAMPLE_BYTES_MIN` of preload/sample.h.
pub const SAMPLE_BYTES_MIN: u64 = 1;
/// The largest distance that the library takes. `SAMPLE_BYTES_MAX` of preload/sample.h.
pub const SAMPLE_BYTES_MAX: u64 = 1 << 40;
