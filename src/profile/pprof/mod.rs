//! The profile file: gzipped pprof, which `go tool pprof`, Pyroscope, Parca and speedscope open as it is.
//!
//! What pprof has no field for is written where other tools ignore it: the metadata as one JSON object in a comment that starts with
//! [`METADATA_COMMENT`]; the process and its container, a cut walk, standard errors and guessed frames as labels of the sample,
//! the allocator's own frames as a label and a table ([`allocator`]). So [`read`] returns what [`write`] was
//! given.

mod allocator;
pub mod proto;
mod read;
#[cfg(test)]
mod tests;
mod write;

pub use allocator::{LABEL_ALLOCATED_BY, LABEL_FRAMES};
pub use read::{ReadError, read, read_file};
pub use write::{Part, encode, write, write_part};

/// Start of the comment that holds the metadata. `go tool pprof` does not show comments that start with `#`.
pub const METADATA_COMMENT: &str = "#fragprof ";

/// Numeric sample label: the process id.
pub const LABEL_PID: &str = "pid";
/// String sample label: the process's name.
pub const LABEL_COMM: &str = "comm";
/// String sample label: why the stack walk ended before the thread's entry.
pub const LABEL_TRUNCATED: &str = "stack_truncated";
/// Numeric sample label, one per such frame: index in the sample's locations, leaf = 0, of a location found by a guarded frame-pointer step.
/// The unit keeps pprof from dropping the 0.
pub const LABEL_GUESSED: &str = "guessed_frame";
/// String sample label: the managed runtime whose frames the stack has, the innermost one: `java`.
pub const LABEL_RUNTIME: &str = "runtime";
/// Unit of [`LABEL_GUESSED`].
pub const LABEL_GUESSED_UNIT: &str = "index";
/// String sample label: which of its values are lower bounds, such as [`LABEL_BOUND_RATES`].
pub const LABEL_BOUND: &str = "lower_bound";
/// The values of allocations and survivors.
pub const LABEL_BOUND_RATES: &str = "alloc, survivor";
/// Suffix of the numeric labels for standard errors of estimates: `inuse_space_stderr`.
pub const ERROR_SUFFIX: &str = "_stderr";
/// Most [`LABEL_GUESSED`] labels of a sample that are read: the most frames that a recorded stack has.
pub const GUESSED_MAX: usize = 128;
