//! What a census knows of its own error.

use serde::Serialize;

/// Unknown bytes of the extent above which a census is no basis for a verdict, in percent.
pub const UNKNOWN_PERCENT_MAX: u64 = 1;

/// Counters of a walk. All zero for a heap at rest, apart from `windows`, `read_bytes` and `duration_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct WalkQuality {
    /// Time from the first look at the mappings to the last read, in milliseconds.
    pub duration_ms: f64,
    /// Windows of memory read.
    pub windows: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Headers that made no sense where one was due.
    pub broken_headers: u64,
    /// Times another boundary of the window before was taken instead.
    pub replaced_boundaries: u64,
    /// Times the walk had to find a new boundary by trial.
    pub resynchronised: u64,
    /// Times the walk went back to an earlier boundary and read a stretch again, because it had changed under it.
    pub walked_again: u64,
    /// Bytes of gaps that were given up, part of the extent.
    pub unknown_bytes: u64,
    /// Bytes that could not be read (swapped out, gone, or past the time limit), part of `unknown_bytes`.
    pub unread_bytes: u64,
    /// Free lists that ended in nonsense.
    pub broken_lists: u64,
    /// Whether extent = live + cached + free + top + overhead + unknown holds to the byte.
    pub balanced: bool,
    /// Whether verdicts may rest on it: balanced, and unknown within [`UNKNOWN_PERCENT_MAX`].
    pub usable: bool,
}

impl WalkQuality {
    /// Sets `usable` for a heap of `extent_bytes`.
    pub fn judge(&mut self, extent_bytes: u64, balanced: bool) {
        self.balanced = balanced;
        self.usable = balanced && self.unknown_bytes.saturating_mul(100) <= extent_bytes.saturating_mul(UNKNOWN_PERCENT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_one_percent_unknown_makes_a_census_unusable() {
        let usable = |unknown_bytes, balanced| {
            let mut quality = WalkQuality { unknown_bytes, ..WalkQuality::default() };
            quality.judge(1000, balanced);
            quality.usable
        };
        assert!(usable(10, true));
        assert!(!usable(11, true));
        assert!(!usable(0, false));
    }
}
