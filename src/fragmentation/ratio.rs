//! The two ratios, with the bytes behind them: after a trim the extent stays while RSS falls, so neither can be read alone.

/// `fragmentation_ratio = 1 − live / resident`: 0 is perfect. `extent_ratio = extent / live`: 1 is perfect.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Ratios {
    /// Live bytes.
    pub live_bytes: u64,
    /// Bytes of the heap in RAM.
    pub resident_bytes: u64,
    /// Address space of the heap.
    pub extent_bytes: u64,
    /// Resident bytes of which it is not known whether they are free. They count as live, which makes both ratios lower bounds. 0 after a
    /// census that understood everything.
    pub unknown_bytes: u64,
}

impl Ratios {
    /// `1 − (live + unknown) / resident`; `None` if nothing is resident. If live is larger than resident, because of live bytes that were
    /// never touched or are swapped out, there is no fragmentation: 0.
    pub fn fragmentation_ratio(&self) -> Option<f64> {
        (self.resident_bytes > 0).then(|| (1.0 - self.used_bytes() / self.resident_bytes as f64).max(0.0))
    }

    /// `extent / (live + unknown)`; `None` if both are 0.
    pub fn extent_ratio(&self) -> Option<f64> {
        let used_bytes = self.used_bytes();
        (used_bytes > 0.0).then(|| self.extent_bytes as f64 / used_bytes)
    }

    fn used_bytes(&self) -> f64 {
        self.live_bytes as f64 + self.unknown_bytes as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_follow_their_definitions_and_are_absent_where_undefined() {
        let ratios = Ratios { live_bytes: 25, resident_bytes: 100, extent_bytes: 200, unknown_bytes: 0 };
        assert_eq!((ratios.fragmentation_ratio(), ratios.extent_ratio()), (Some(0.75), Some(8.0)));
        assert_eq!(Ratios { live_bytes: 101, ..ratios }.fragmentation_ratio(), Some(0.0));
        let partly_known = Ratios { unknown_bytes: 50, ..ratios };
        assert_eq!(partly_known.fragmentation_ratio(), Some(0.25));
        let empty = Ratios::default();
        assert_eq!((empty.fragmentation_ratio(), empty.extent_ratio()), (None, None));
    }
}
