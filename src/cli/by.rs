//! `--by`: which value a profile's stacks are ranked by.

use clap::ValueEnum;

use crate::error::{ExitStatus, Failed};
use crate::profile::text::View;
use crate::profile::{Profile, ValueKind};

/// The value to rank stacks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Bytes outstanding at the end of the recording
    Live,
    /// Bytes allocated during the recording
    Allocated,
    /// Bytes that outlived the recording's survivor age
    Survivors,
    /// Free bytes that a stack's live bytes keep from going back
    Pinned,
    /// Whole free pages below a heap's highest live chunks
    Blocked,
    /// Bytes by which the heap grew while free bytes existed
    Growth,
    /// Bytes outstanding at the high-water mark
    Peak,
}

impl By {
    /// The kind of value, with its words.
    pub fn view(self) -> View {
        let view = |kind, count, head, words| View { kind, count, head, words };
        match self {
            Self::Live => view(ValueKind::InuseSpace, Some(ValueKind::InuseObjects), "LIVE", "live bytes"),
            Self::Allocated => view(ValueKind::AllocSpace, Some(ValueKind::AllocObjects), "ALLOCATED", "allocated bytes"),
            Self::Survivors => view(ValueKind::SurvivorSpace, Some(ValueKind::SurvivorObjects), "SURVIVORS", "surviving bytes"),
            Self::Pinned => view(ValueKind::PinnedSpace, None, "PINNED", "pinned bytes"),
            Self::Blocked => view(ValueKind::BlockedSpace, None, "BLOCKED", "blocked bytes"),
            Self::Growth => view(ValueKind::GrowthSpace, None, "GROWTH", "growth bytes"),
            Self::Peak => view(ValueKind::PeakSpace, None, "AT PEAK", "bytes at the peak"),
        }
    }

    /// The view, if the profile measured its value.
    ///
    /// # Errors
    /// With what the profile does have.
    pub fn measured_in(self, profile: &Profile, path: &std::path::Path) -> Result<View, Failed> {
        let view = self.view();
        if profile.meta.kinds.contains(view.kind) {
            return Ok(view);
        }
        let name = |by: By| by.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let has: Vec<String> =
            Self::value_variants().iter().filter(|by| profile.meta.kinds.contains(by.view().kind)).map(|&by| name(by)).collect();
        let has = if has.is_empty() { "no value to rank by".to_owned() } else { has.join(", ") };
        Err(Failed::new(ExitStatus::Usage, format!("{} does not say {}: it has {has}", path.display(), view.words)))
    }
}
