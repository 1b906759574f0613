//! Choices of other modules as values of options.

use clap::ValueEnum;
use clap::builder::PossibleValue;

use crate::census::Level;
use crate::retention::owners::By;

impl ValueEnum for Level {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Top, Self::Sampled, Self::Full]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        Some(PossibleValue::new(self.name()).help(match self {
            Self::Top => "Extent, tops, mmapped chunks, arenas, resident bytes: about a millisecond",
            Self::Sampled => {
                "As top, and shares of live and free bytes from random windows, with their error: about 20 ms whatever the heap's size, or per GiB if its blocks are large"
            }
            Self::Full => "Every chunk",
        }))
    }
}

impl ValueEnum for By {
    fn value_variants<'a>() -> &'a [Self] {
        &[Self::Live, Self::Pinned, Self::Blocked]
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        let (name, help) = match self {
            Self::Live => ("live", "Bytes in use"),
            Self::Pinned => ("pinned", "Free bytes that they keep from going back"),
            Self::Blocked => ("blocked", "Whole free pages under a heap's highest block, which the allocator would give back if that went"),
        };
        Some(PossibleValue::new(name).help(help))
    }
}
