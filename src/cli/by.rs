//! `--by`: the value by which a profile's stacks are ranked, and the default.

use std::path::Path;

use clap::ValueEnum;

use crate::error::{ExitStatus, Failed};
use crate::profile::text::View;
use crate::profile::{Profile, ValueKind};

/// The value to rank stacks by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum By {
    /// Bytes in use at the end: of the whole heap if a census read it, else of what was recorded; in governed mode, of blocks above
    /// 1 KiB if they were tracked, else the bytes confirmed live
    Live,
    /// Bytes allocated during the recording
    Allocated,
    /// Bytes that survived the recording's survivor age
    Survivors,
    /// Free bytes on pages that also hold live bytes of the stack
    Pinned,
    /// Whole free pages below a heap's highest live block
    Blocked,
    /// Bytes by which the heap grew while enough free bytes were available
    Growth,
    /// Bytes outstanding at the high-water mark
    Peak,
    /// Bytes of heap pages that the stack touched first (governed mode)
    Touched,
    /// Bytes of blocks to which no pointer was seen (profiles of `leaks`)
    Unreached,
}

impl By {
    /// The kinds of value that it can mean, best first, with their names. A census counts the live bytes of the whole heap; without one
    /// only those of the recording are known.
    fn views(self) -> Vec<View> {
        let view = |kind, count, head, words| View { kind, count, head, words };
        match self {
            Self::Live => vec![
                view(ValueKind::LiveSpace, Some(ValueKind::LiveObjects), "LIVE", "live bytes"),
                view(ValueKind::LargeSpace, Some(ValueKind::LargeObjects), "LIVE >1K", "live bytes of blocks above 1 KiB"),
                view(ValueKind::ConfirmedSpace, Some(ValueKind::SameObjects), "LIVE ≥", "bytes confirmed live"),
                view(ValueKind::InuseSpace, Some(ValueKind::InuseObjects), "LIVE", "live bytes"),
            ],
            Self::Allocated => vec![view(ValueKind::AllocSpace, Some(ValueKind::AllocObjects), "ALLOCATED", "allocated bytes")],
            Self::Survivors => vec![view(ValueKind::SurvivorSpace, Some(ValueKind::SurvivorObjects), "SURVIVORS", "surviving bytes")],
            Self::Pinned => vec![view(ValueKind::PinnedSpace, None, "PINNED", "pinned bytes")],
            Self::Blocked => vec![view(ValueKind::BlockedSpace, None, "BLOCKED", "blocked bytes")],
            Self::Growth => vec![view(ValueKind::GrowthSpace, None, "GROWTH", "growth bytes")],
            Self::Touched => vec![view(ValueKind::TouchedSpace, None, "TOUCHED", "bytes touched first")],
            Self::Unreached => {
                vec![view(ValueKind::UnreachedSpace, Some(ValueKind::UnreachedObjects), "UNREACHED", "bytes to which no pointer was seen")]
            }
            Self::Peak => vec![view(ValueKind::PeakSpace, None, "AT PEAK", "bytes at the peak")],
        }
    }

    /// The kind of value that every tier measures.
    pub fn kind(self) -> ValueKind {
        self.views().last().map_or(ValueKind::InuseSpace, |view| view.kind)
    }

    /// Its name on the command line.
    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    /// The best view whose value all profiles measured.
    fn in_all(self, profiles: &[(&Profile, &Path)]) -> Option<View> {
        self.views().into_iter().find(|view| profiles.iter().all(|(profile, _)| profile.meta.kinds.contains(view.kind)))
    }

    /// The view that was requested; by default the first of live, survivors, allocated, and then the others, for which a stack has bytes.
    ///
    /// # Errors
    /// If the profiles did not measure it, or measured it in different ways; the message lists the values they have.
    pub fn view(asked: Option<Self>, profiles: &[(&Profile, &Path)]) -> Result<View, Failed> {
        let view = asked.map_or_else(|| Self::leading(profiles), |by| by.in_all(profiles));
        view.map(|view| of_the_heap(view, profiles)).ok_or_else(|| Self::lacking(asked, profiles))
    }

    fn leading(profiles: &[(&Profile, &Path)]) -> Option<View> {
        let first = [Self::Live, Self::Survivors, Self::Allocated];
        let order = first.iter().chain(Self::value_variants().iter().filter(|by| !first.contains(by)));
        let views: Vec<View> = order.filter_map(|by| by.in_all(profiles)).collect();
        let shows = |view: &&View| profiles.iter().any(|(profile, _)| profile.has_stacks_of(view.kind));
        views.iter().find(shows).or(views.first()).copied()
    }

    /// The error for profiles that lack the value.
    fn lacking(asked: Option<Self>, profiles: &[(&Profile, &Path)]) -> Failed {
        let has = |profile: &Profile| {
            let has: Vec<String> = Self::value_variants()
                .iter()
                .flat_map(|by| by.views().into_iter().map(move |view| (by, view)))
                .filter(|(_, view)| profile.meta.kinds.contains(view.kind))
                .map(|(by, view)| if *by == Self::Live { format!("live ({})", view.words) } else { by.name() })
                .collect();
            if has.is_empty() { "no value to rank by".to_owned() } else { has.join(", ") }
        };
        let each: Vec<String> = profiles.iter().map(|(profile, path)| format!("{} has {}", path.display(), has(profile))).collect();
        let wanted = match (asked, profiles) {
            (Some(by), [_]) => format!("there are no {} in it", by.views().first().map_or("", |view| view.words)),
            (Some(by), _) => format!("--by {} compares nothing that all of them measured", by.name()),
            (None, _) => "there is nothing to rank by that all of them measured".to_owned(),
        };
        Failed::new(ExitStatus::Usage, format!("{wanted}: {}", each.join("; ")))
    }
}

/// The name of a view whose rows add up to the whole heap, although its stacks cover only blocks above 1 KiB.
fn of_the_heap(view: View, profiles: &[(&Profile, &Path)]) -> View {
    let has_rest = |profile: &Profile| profile.stacks().iter().any(|stack| profile.is_rest(stack) && stack.values.get(view.kind) > 0);
    match view.kind == ValueKind::LargeSpace && profiles.iter().any(|(profile, _)| has_rest(profile)) {
        true => View { head: "LIVE", words: "live bytes (of stacks: blocks above 1 KiB)", ..view },
        false => view,
    }
}
