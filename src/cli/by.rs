//! `--by`: which value a profile's stacks are ranked by.

use std::path::Path;

use clap::ValueEnum;

use crate::error::{ExitStatus, Failed};
use crate::profile::text::View;
use crate::profile::{Profile, ValueKind};

/// The value to rank stacks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Bytes in use at the end: of the whole heap where a census read it, else of the recording; under a budget, of blocks above 1 KiB,
    /// else what is confirmed
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
    /// Bytes of heap pages that the stack touched first (governed recordings)
    Touched,
}

impl By {
    /// The kinds of value that answer it, the best first, with their words. A census counts the live bytes of the whole heap; without one
    /// they are those of the recording.
    fn views(self) -> Vec<View> {
        let view = |kind, count, head, words| View { kind, count, head, words };
        match self {
            Self::Live => vec![
                view(ValueKind::LiveSpace, Some(ValueKind::LiveObjects), "LIVE", "live bytes"),
                view(ValueKind::LargeSpace, Some(ValueKind::LargeObjects), "LIVE >1K", "live bytes of blocks above 1 KiB"),
                view(ValueKind::ConfirmedSpace, Some(ValueKind::SameObjects), "LIVE ≥", "bytes confirmed to live"),
                view(ValueKind::InuseSpace, Some(ValueKind::InuseObjects), "LIVE", "live bytes"),
            ],
            Self::Allocated => vec![view(ValueKind::AllocSpace, Some(ValueKind::AllocObjects), "ALLOCATED", "allocated bytes")],
            Self::Survivors => vec![view(ValueKind::SurvivorSpace, Some(ValueKind::SurvivorObjects), "SURVIVORS", "surviving bytes")],
            Self::Pinned => vec![view(ValueKind::PinnedSpace, None, "PINNED", "pinned bytes")],
            Self::Blocked => vec![view(ValueKind::BlockedSpace, None, "BLOCKED", "blocked bytes")],
            Self::Growth => vec![view(ValueKind::GrowthSpace, None, "GROWTH", "growth bytes")],
            Self::Touched => vec![view(ValueKind::TouchedSpace, None, "TOUCHED", "bytes touched first")],
            Self::Peak => vec![view(ValueKind::PeakSpace, None, "AT PEAK", "bytes at the peak")],
        }
    }

    /// The kind of value that every tier measures.
    pub fn kind(self) -> ValueKind {
        self.views().last().map_or(ValueKind::InuseSpace, |view| view.kind)
    }

    fn is_in(self, profile: &Profile) -> bool {
        self.views().iter().any(|view| profile.meta.kinds.contains(view.kind))
    }

    /// The best view whose value all profiles measured.
    ///
    /// # Errors
    /// With what the first profile that lacks it does have.
    pub fn measured_in(self, profiles: &[(&Profile, &Path)]) -> Result<View, Failed> {
        let views = self.views();
        let in_all = |view: &&View| profiles.iter().all(|(profile, _)| profile.meta.kinds.contains(view.kind));
        if let Some(view) = views.iter().find(in_all) {
            return Ok(*view);
        }
        let words = views.first().map_or("", |view| view.words);
        let lacks = profiles.iter().find(|(profile, _)| !self.is_in(profile)).or(profiles.first());
        let Some((profile, path)) = lacks else { return Err(Failed::new(ExitStatus::Usage, format!("no profile says {words}"))) };
        let name = |by: &Self| by.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let has: Vec<String> = Self::value_variants().iter().filter(|by| by.is_in(profile)).map(name).collect();
        let has = if has.is_empty() { "no value to rank by".to_owned() } else { has.join(", ") };
        Err(Failed::new(ExitStatus::Usage, format!("{} does not say {words}: it has {has}", path.display())))
    }
}
