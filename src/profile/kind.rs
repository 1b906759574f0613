//! The kinds of value a stack carries: their pprof sample types, their JSON keys, and the words for people.

use serde::{Deserialize, Serialize};

use crate::kept::is_flagged;

/// Number of kinds; the length of [`Values`].
pub const KINDS: usize = 26;

/// One kind of value. The order is that of the pprof sample types and stable: the first seven are fixed, extra ones come after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum ValueKind {
    /// Allocations made during the recording. A count.
    AllocObjects = 0,
    /// Bytes requested by the allocations made during the recording.
    AllocSpace,
    /// Allocations outstanding at the end of the recording. A count.
    InuseObjects,
    /// Bytes requested by the allocations outstanding at the end of the recording.
    InuseSpace,
    /// Free bytes that the stack's live bytes keep from being returned: on each page with live and free bytes, each live allocation is
    /// charged with the free bytes in proportion to its live bytes on that page.
    PinnedSpace,
    /// Whole free pages below the highest live chunk of a heap, which the allocator would return if that chunk were freed.
    BlockedSpace,
    /// Bytes by which the stack made the heap grow while enough free bytes for the request existed.
    GrowthSpace,
    /// Bytes outstanding at the high-water mark of the process's recorded live bytes.
    PeakSpace,
    /// The part of [`InuseSpace`](Self::InuseSpace) that may have been freed, because records were lost.
    DoubtfulSpace,
    /// Allocations that outlived the recording's survivor age. A count.
    SurvivorObjects,
    /// Bytes of the allocations that outlived the recording's survivor age.
    SurvivorSpace,
    /// Chunks in use at the end as a census counts them. A count.
    LiveObjects,
    /// Bytes of the chunks in use at the end, with the allocator's rounding. Summed over the stacks, `[before attach]` and
    /// `[unattributed]` it is the census's live bytes, exactly.
    LiveSpace,
    /// Bytes that outlived 10 ms.
    Survivor10MsSpace,
    /// Bytes that outlived 100 ms.
    Survivor100MsSpace,
    /// Bytes that outlived 1 s.
    Survivor1SSpace,
    /// Bytes that outlived 10 s.
    Survivor10SSpace,
    /// Bytes of heap pages that the stack touched first, by which it made the resident memory grow. An estimate from a sample.
    TouchedSpace,
    /// Survivors of windows, old enough, that were checked again. A raw count, not scaled.
    SampledObjects,
    /// Of those, the ones that can be distinguished from other blocks; the others give no information.
    InformativeObjects,
    /// Of these, the ones that were found the same at every check.
    SameObjects,
    /// Bytes of a flagged stack that are confirmed live, a lower bound: those of blocks found the same, not scaled, minus an allowance for
    /// errors. At [`UNATTRIBUTED`](super::UNATTRIBUTED) the rest of the census's live bytes.
    ConfirmedSpace,
    /// Large blocks (above 1 KiB in glibc) outstanding at the end, of those allocated since tracking began without a gap. A count.
    LargeObjects,
    /// Usable bytes of these blocks. Counted, not estimated.
    LargeSpace,
    /// Blocks in use to which no scan saw a pointer. A count.
    UnreachedObjects,
    /// Usable bytes of these blocks.
    UnreachedSpace,
}

impl ValueKind {
    /// Every kind, in sample-type order.
    pub const ALL: [ValueKind; KINDS] = [
        Self::AllocObjects,
        Self::AllocSpace,
        Self::InuseObjects,
        Self::InuseSpace,
        Self::PinnedSpace,
        Self::BlockedSpace,
        Self::GrowthSpace,
        Self::PeakSpace,
        Self::DoubtfulSpace,
        Self::SurvivorObjects,
        Self::SurvivorSpace,
        Self::LiveObjects,
        Self::LiveSpace,
        Self::Survivor10MsSpace,
        Self::Survivor100MsSpace,
        Self::Survivor1SSpace,
        Self::Survivor10SSpace,
        Self::TouchedSpace,
        Self::SampledObjects,
        Self::InformativeObjects,
        Self::SameObjects,
        Self::ConfirmedSpace,
        Self::LargeObjects,
        Self::LargeSpace,
        Self::UnreachedObjects,
        Self::UnreachedSpace,
    ];

    /// Bytes that outlived each of the governor's ages.
    pub const OUTLIVED: [Self; 4] = [Self::Survivor10MsSpace, Self::Survivor100MsSpace, Self::Survivor1SSpace, Self::Survivor10SSpace];

    /// Whether it measures survivors of windows.
    pub fn is_of_survivors(self) -> bool {
        matches!(self, Self::SurvivorObjects | Self::SurvivorSpace) || Self::OUTLIVED.contains(&self)
    }

    /// The kinds that every profile file carries, whether measured or not, so that tools find the same columns each time.
    pub const ALWAYS_WRITTEN: usize = 7;

    /// The pprof sample type, such as `inuse_space`.
    pub fn name(self) -> &'static str {
        match self {
            Self::AllocObjects => "alloc_objects",
            Self::AllocSpace => "alloc_space",
            Self::InuseObjects => "inuse_objects",
            Self::InuseSpace => "inuse_space",
            Self::PinnedSpace => "pinned_space",
            Self::BlockedSpace => "blocked_space",
            Self::GrowthSpace => "growth_space",
            Self::PeakSpace => "peak_space",
            Self::DoubtfulSpace => "doubtful_space",
            Self::SurvivorObjects => "survivor_objects",
            Self::SurvivorSpace => "survivor_space",
            Self::LiveObjects => "live_objects",
            Self::LiveSpace => "live_space",
            Self::Survivor10MsSpace => "survivor_10ms_space",
            Self::Survivor100MsSpace => "survivor_100ms_space",
            Self::Survivor1SSpace => "survivor_1s_space",
            Self::Survivor10SSpace => "survivor_10s_space",
            Self::TouchedSpace => "touched_space",
            Self::SampledObjects => "sampled_objects",
            Self::InformativeObjects => "informative_objects",
            Self::SameObjects => "same_objects",
            Self::ConfirmedSpace => "confirmed_space",
            Self::LargeObjects => "large_objects",
            Self::LargeSpace => "large_space",
            Self::UnreachedObjects => "unreached_objects",
            Self::UnreachedSpace => "unreached_space",
        }
    }

    /// The pprof unit: `count` or `bytes`.
    pub fn unit(self) -> &'static str {
        match self {
            Self::AllocObjects
            | Self::InuseObjects
            | Self::SurvivorObjects
            | Self::LiveObjects
            | Self::SampledObjects
            | Self::InformativeObjects
            | Self::SameObjects
            | Self::LargeObjects
            | Self::UnreachedObjects => "count",
            _ => "bytes",
        }
    }

    /// The key in JSON output, unit last. The first seven and `peak_inuse_bytes` are a stable interface.
    pub fn json_key(self) -> &'static str {
        match self {
            Self::AllocObjects => "allocations",
            Self::AllocSpace => "allocated_bytes",
            Self::InuseObjects => "inuse_allocations",
            Self::InuseSpace => "inuse_bytes",
            Self::PinnedSpace => "pinned_bytes",
            Self::BlockedSpace => "blocked_bytes",
            Self::GrowthSpace => "growth_bytes",
            Self::PeakSpace => "peak_inuse_bytes",
            Self::DoubtfulSpace => "doubtful_bytes",
            Self::SurvivorObjects => "survivor_allocations",
            Self::SurvivorSpace => "survivor_bytes",
            Self::LiveObjects => "live_allocations",
            Self::LiveSpace => "live_bytes",
            Self::Survivor10MsSpace => "survivor_10ms_bytes",
            Self::Survivor100MsSpace => "survivor_100ms_bytes",
            Self::Survivor1SSpace => "survivor_1s_bytes",
            Self::Survivor10SSpace => "survivor_10s_bytes",
            Self::TouchedSpace => "touched_bytes",
            Self::SampledObjects => "sampled_survivors",
            Self::InformativeObjects => "informative_survivors",
            Self::SameObjects => "same_survivors",
            Self::ConfirmedSpace => "confirmed_bytes",
            Self::LargeObjects => "large_allocations",
            Self::LargeSpace => "large_bytes",
            Self::UnreachedObjects => "unreached_blocks",
            Self::UnreachedSpace => "unreached_bytes",
        }
    }

    /// The key in JSON output where the value is an estimate: `inuse_bytes_est`. Raw and scaled numbers never share a name.
    pub fn json_key_est(self) -> String {
        format!("{}_est", self.json_key())
    }

    /// The key of the estimate's standard error: `inuse_bytes_stderr`.
    pub fn json_key_stderr(self) -> String {
        format!("{}_stderr", self.json_key())
    }

    /// Whether it is a raw count even in a mode that estimates: it has no error, and its key no `_est`.
    pub fn is_seen(self) -> bool {
        matches!(
            self,
            Self::SampledObjects
                | Self::InformativeObjects
                | Self::SameObjects
                | Self::ConfirmedSpace
                | Self::LargeObjects
                | Self::LargeSpace
                | Self::UnreachedObjects
                | Self::UnreachedSpace
        )
    }

    /// The key where the value is only a lower bound: `allocated_bytes_min`.
    pub fn json_key_min(self) -> String {
        format!("{}_min", self.json_key())
    }

    /// Whether windows measure it as a rate: allocations, survivors. If probes delay a process too much, these are lower bounds.
    pub fn is_rate(self) -> bool {
        matches!(self, Self::AllocObjects | Self::AllocSpace | Self::SurvivorObjects | Self::SurvivorSpace)
            || Self::OUTLIVED.contains(&self)
    }

    /// Whether values of consecutive intervals add up, because it counts what was allocated in each. The others describe the heap at a
    /// moment, or since some earlier time, and must not be added over time.
    pub fn adds_up_over_time(self) -> bool {
        // Survivors of a fixed age do. `survivor_space` does not: its age depends on the length of the recording.
        matches!(self, Self::AllocObjects | Self::AllocSpace) || Self::OUTLIVED.contains(&self)
    }

    /// Its name as a value of `--by` and of the API's parameter `by`; `None` for kinds that are shown next to another.
    pub fn by(self) -> Option<&'static str> {
        match self {
            Self::InuseSpace | Self::LiveSpace | Self::LargeSpace | Self::ConfirmedSpace => Some("live"),
            Self::TouchedSpace => Some("touched"),
            Self::AllocSpace => Some("allocated"),
            Self::SurvivorSpace => Some("survivors"),
            Self::PinnedSpace => Some("pinned"),
            Self::BlockedSpace => Some("blocked"),
            Self::GrowthSpace => Some("growth"),
            Self::PeakSpace => Some("peak"),
            Self::UnreachedSpace => Some("unreached"),
            _ => None,
        }
    }

    /// The kind of a value of `--by`; if several match, the one that every tier measures ([`best_in`](Self::best_in) gives the best).
    pub fn from_by(by: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.by() == Some(by) && *kind != Self::LiveSpace)
    }

    /// The best kind with the same meaning in a profile that measured these: live bytes of the whole heap before those of the recording,
    /// then those of large blocks, then those confirmed live.
    #[must_use]
    pub fn best_in(self, kinds: KindSet) -> Self {
        match self {
            Self::InuseSpace if kinds.contains(Self::LiveSpace) => Self::LiveSpace,
            Self::InuseSpace if kinds.contains(Self::LargeSpace) => Self::LargeSpace,
            Self::InuseSpace if kinds.contains(Self::ConfirmedSpace) => Self::ConfirmedSpace,
            _ => self,
        }
    }

    /// Index in [`Values`].
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The values of one stack, or their totals, one per kind. Bytes or counts, as [`ValueKind::unit`] says. Sums saturate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct Values([u64; KINDS]);

impl Values {
    /// The value of a kind.
    pub fn get(&self, kind: ValueKind) -> u64 {
        self.0[kind.index()]
    }

    /// Sets the value of a kind.
    pub fn set(&mut self, kind: ValueKind, value: u64) {
        self.0[kind.index()] = value;
    }

    /// The same values with one kind set, for building a row in one expression.
    #[must_use]
    pub fn with(mut self, kind: ValueKind, value: u64) -> Self {
        self.set(kind, value);
        self
    }

    /// The sort key of stacks for a kind, in descending order: its value; for survivors, flagged stacks come before all others, because most
    /// survivors of a short window are freed soon after it.
    pub fn rank(&self, kind: ValueKind) -> (bool, u64) {
        (kind.is_of_survivors() && self.is_flagged(), self.get(kind))
    }

    /// Whether the stack is known to keep what it allocates ([`is_flagged`]). `false` means nothing.
    pub fn is_flagged(&self) -> bool {
        is_flagged(self.get(ValueKind::SampledObjects), self.get(ValueKind::InformativeObjects), self.get(ValueKind::SameObjects))
    }

    /// Share of the survivors checked again that gave no information; `None` if none was checked.
    pub fn no_information_ratio(&self) -> Option<f64> {
        let (sampled, informative) = (self.get(ValueKind::SampledObjects), self.get(ValueKind::InformativeObjects));
        (sampled > 0).then(|| sampled.saturating_sub(informative) as f64 / sampled as f64)
    }

    /// Adds another row, kind by kind.
    pub fn add(&mut self, other: &Values) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = mine.saturating_add(theirs);
        }
    }

    /// Whether every value is 0.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|&v| v == 0)
    }
}

/// The standard errors of a row's values, one per kind, in the value's unit; 0 if the value is exact. Errors of different rows are treated
/// as independent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct StandardErrors([u64; KINDS]);

impl StandardErrors {
    /// The standard error of a kind's value.
    pub fn get(&self, kind: ValueKind) -> u64 {
        self.0[kind.index()]
    }

    /// Sets the standard error of a kind's value.
    pub fn set(&mut self, kind: ValueKind, error: u64) {
        self.0[kind.index()] = error;
    }

    /// The same errors with one kind set, for building a row in one expression.
    #[must_use]
    pub fn with(mut self, kind: ValueKind, error: u64) -> Self {
        self.set(kind, error);
        self
    }

    /// The errors of a sum: variances add.
    pub fn add(&mut self, other: &StandardErrors) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = match (*mine, theirs) {
                (own, 0) => own,
                (0, other) => other,
                (own, other) => (own as f64).hypot(other as f64).round() as u64,
            };
        }
    }

    /// Whether every value is exact.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|&v| v == 0)
    }
}

/// The kinds that a profile measured. A kind outside the set is unknown, not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub struct KindSet(u32);

impl KindSet {
    /// No kind.
    pub const EMPTY: KindSet = KindSet(0);

    /// The set with one more kind.
    #[must_use]
    pub const fn with(self, kind: ValueKind) -> Self {
        Self(self.0 | 1 << kind as u8)
    }

    /// Whether the kind was measured.
    pub fn contains(self, kind: ValueKind) -> bool {
        self.0 & (1 << kind as u8) != 0
    }

    /// The kinds of the set, in sample-type order.
    pub fn iter(self) -> impl Iterator<Item = ValueKind> {
        ValueKind::ALL.into_iter().filter(move |&kind| self.contains(kind))
    }
}

impl KindSet {
    /// The values of `--by` by which its profile can be ranked, each once.
    #[must_use]
    pub fn by_names(self) -> Vec<String> {
        let mut names: Vec<String> = Vec::new();
        for name in self.iter().filter_map(ValueKind::by) {
            if !names.iter().any(|known| known == name) {
                names.push(name.to_owned());
            }
        }
        names
    }
}

impl FromIterator<ValueKind> for KindSet {
    fn from_iter<I: IntoIterator<Item = ValueKind>>(kinds: I) -> Self {
        kinds.into_iter().fold(Self::EMPTY, Self::with)
    }
}

impl Serialize for KindSet {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(ValueKind::name))
    }
}

impl<'de> Deserialize<'de> for KindSet {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Unknown names are skipped: a newer fragprof may have more kinds.
        let names = Vec::<String>::deserialize(deserializer)?;
        Ok(ValueKind::ALL.into_iter().filter(|kind| names.iter().any(|name| name == kind.name())).collect())
    }
}
