//! The preload libraries that sample, or record, allocations inside a program, and starting a program with them.
//!
//! ```text
//! preload/*.c ──build.rs──► two libraries that sample and two that record every call (`ring.h`), embedded here
//! fit      whether a program can run with one, and with which
//! image    the same for a program of another root directory, from its files alone
//! root     such a root directory: one directory, or layers
//! library  writes the library to where the dynamic linker of any program finds it
//! unit     starts systemd's units with it
//! ```
//!
//! The sampler (C, without dependencies, the same file under glibc and musl) interposes the allocator of the program. Each byte that a
//! thread allocates is a sample point with probability 1/T. T is 512 KiB by default, on average over call sites: less where blocks live long
//! (preload/site.h). It is doubled as often as needed to keep the samples below 250 per second on each CPU and in each thread. A sampled allocation, and the free of its block, hits a probe of the `otel_memory`
//! specification (OpenTelemetry eBPF profiler, design document 00003):
//!
//! | probe | arguments, in rdi, rsi, rdx, rcx |
//! |---|---|
//! | `otel_memory:alloc` | pointer, size in bytes, weight in bytes = sample points × T, T (not in the specification) |
//! | `otel_memory:free` | pointer |
//!
//! Both have semaphores. While no consumer is attached, a call costs a load, a test and a jump.
//!
//! # What a consumer needs to know
//! - Attach to `free` first and detach from it last: a block whose `alloc` is reported without a consumer of `free` is not tracked.
//! - The weight is an unbiased estimate of the bytes, weight / size of the blocks. The variance of a sum of weights is estimated by the
//!   sum of T · weight, so its standard error is √(Σ T · weight).
//! - A `free` whose `alloc` was not seen belongs to a block that was sampled for an earlier consumer: ignore it.
//! - `realloc` is reported as `free` before the call and, if the new block is sampled, `alloc` after it. If it fails for lack of memory the
//!   old block is reported again, with the stack of that moment.
//! - If the set of live samples is full (65,535), a sample is reported as `alloc` and immediately as `free`, and counted.
//! - The leaf frames of a stack that are in the library should be omitted. It has `.eh_frame` for all of its code.
//! - A forked child has a copy of the blocks and of the semaphores: it keeps counting until the probes are detached, whether a consumer is
//!   attached to it or not.
//! - The exported object `fragprof_sampler_stats` (preload/sample.h) has the shortest T, whether the library interposes malloc, and
//!   counters.

pub mod fit;
pub mod image;
pub mod library;
pub mod root;
pub mod unit;

/// The environment variable with the mean distance of sample points in bytes. Read once, at a program's start.
pub const SAMPLE_BYTES_VARIABLE: &str = "FRAGPROF_SAMPLE_BYTES";
/// The environment variable with the samples per second, on a CPU or in a thread, above which the distance is doubled; 0 = it is never
/// doubled. Read once, at a program's start.
pub const SAMPLES_PER_SECOND_VARIABLE: &str = "FRAGPROF_SAMPLES_PER_SECOND";
/// The library's default limit. `LIMIT_SAMPLES_PER_SECOND` of preload/limit.h.
pub const SAMPLES_PER_SECOND_DEFAULT: u64 = 250;
/// The largest limit that the library accepts. `LIMIT_SAMPLES_PER_SECOND_MAX` of preload/limit.h.
pub const SAMPLES_PER_SECOND_MAX: u64 = 1_000_000;
/// The library's default distance. `SAMPLE_BYTES_DEFAULT` of preload/sample.h.
pub const SAMPLE_BYTES_DEFAULT: u64 = 512 << 10;
/// The smallest distance that the library accepts: every allocation is sampled. `SAMPLE_BYTES_MIN` of preload/sample.h.
pub const SAMPLE_BYTES_MIN: u64 = 1;
/// The largest distance that the library accepts. `SAMPLE_BYTES_MAX` of preload/sample.h.
pub const SAMPLE_BYTES_MAX: u64 = 1 << 40;
