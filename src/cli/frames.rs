//! `--frames`: which frames of a stack are shown.

use clap::ValueEnum;

use crate::profile::FrameFilter;

/// Which frames of a stack are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Frames {
    /// All frames
    #[default]
    All,
    /// Frames of native code only
    Native,
    /// Frames of managed runtimes (Java, Python) only
    Managed,
}

impl From<Frames> for FrameFilter {
    fn from(frames: Frames) -> Self {
        match frames {
            Frames::All => Self::All,
            Frames::Native => Self::Native,
            Frames::Managed => Self::Managed,
        }
    }
}
