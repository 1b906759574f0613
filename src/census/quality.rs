//! The quality of a census.

use serde::Serialize;

/// Share of unknown bytes in the extent, in percent, above which a census is not usable for a verdict.
pub const UNKNOWN_PERCENT_MAX: u64 = 1;

/// Counters of a walk. All are 0 for a heap at rest, except `windows`, `read_bytes` and `duration_ms`.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct WalkQuality {
    /// Time from reading the mappings to the last read of memory, in milliseconds.
    pub duration_ms: f64,
    /// Windows of memory read.
    pub windows: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Invalid headers.
    pub broken_headers: u64,
    /// How often another boundary of the previous window was used instead.
    pub replaced_boundaries: u64,
    /// How often the walk had to find a new boundary by trial.
    pub resynchronised: u64,
    /// How often the walk went back to an earlier boundary and read a stretch again, because it had changed.
    pub walked_again: u64,
    /// Bytes of gaps that could not be walked, part of the extent.
    pub unknown_bytes: u64,
    /// Bytes that could not be read (swapped out, unmapped, or beyond the time limit), part of `unknown_bytes`.
    pub unread_bytes: u64,
    /// Free lists with an invalid end.
    pub broken_lists: u64,
    /// Whether extent = live + cached + free + top + overhead + unknown holds to the byte.
    pub balanced: bool,
    /// Whether it is usable for verdicts: balanced, and unknown within [`UNKNOWN_PERCENT_MAX`].
    pub usable: bool,
}

impl WalkQuality {
    /// Adds the failures of another part of the walk.
    pub fn add(&mut self, part: &Self) {
        self.broken_headers += part.broken_headers;
        self.replaced_boundaries += part.replaced_boundaries;
        self.resynchronised += part.resynchronised;
        self.walked_again += part.walked_again;
        self.unknown_bytes = self.unknown_bytes.saturating_add(part.unknown_bytes);
        self.unread_bytes = self.unread_bytes.saturating_add(part.unread_bytes);
        self.broken_lists += part.broken_lists;
    }

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
