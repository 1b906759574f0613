//! Descriptions of why a walk ended.

use std::fmt;

pub use crate::bpf::UnwindEnd as End;

impl End {
    /// Its meaning.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::FrameLimit => "more frames than the limit",
            Self::NoMapping => "an address in no known mapping",
            Self::NoTable => "the file's unwind table is not loaded (yet, or refused by the budget)",
            Self::NoRow => "no unwind information for an address",
            Self::Unsupported => "an unwind rule of an unsupported form",
            Self::ReadFault => "stack memory that could not be read",
            Self::NoProgress => "a corrupt stack: frame addresses do not increase",
            Self::BadPc => "a return address outside user space",
            Self::Jit => "generated code without frame pointers",
            Self::Trampoline => "a probe's return trampoline that could not be resolved",
            Self::FramePointersOnly => "walked by frame pointers only",
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description())
    }
}
