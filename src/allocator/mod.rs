//! The allocators that fragprof knows, one row each: their differences are in the rows, and nowhere else; their entry points, and the
//! bytes that they add to a block.

pub mod cpython;
pub mod detect;
pub mod footprint;
pub mod functions;
pub mod in_file;
mod registry;

use serde::Serialize;

pub use registry::{
    ArenaLimit, CacheSetting, CacheSettings, Choice, ChunkRule, FreedRule, Hold, Release, ReleaseArgument, ReleaseCall, Remedy, Row,
    SettingForm,
};

/// Whether a path is that of one of fragprof's libraries that sample or record: they stand in front of an allocator, and are none.
#[must_use]
pub fn is_own_library(path: &[u8]) -> bool {
    let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or_default();
    name.starts_with(b"libfragprof_") && name != cpython::IN_FRONT.as_bytes()
}

/// An allocator by its implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Allocator {
    /// The GNU C library's.
    Glibc,
    /// musl's, old or mallocng.
    Musl,
    /// jemalloc.
    Jemalloc,
    /// gperftools' tcmalloc.
    Tcmalloc,
    /// Google's tcmalloc.
    GoogleTcmalloc,
    /// mimalloc.
    Mimalloc,
    /// snmalloc.
    Snmalloc,
    /// CPython's, for objects of up to 512 bytes: beside that of malloc.
    Pymalloc,
    /// Some other definition of `malloc` and `free`: an allocator not known here, or a wrapper around another.
    #[default]
    Other,
}

impl Allocator {
    /// Its row.
    #[must_use]
    pub fn row(self) -> &'static Row {
        match self {
            Self::Glibc => &registry::GLIBC,
            Self::Musl => &registry::MUSL,
            Self::Jemalloc => &registry::JEMALLOC,
            Self::Tcmalloc => &registry::TCMALLOC,
            Self::GoogleTcmalloc => &registry::GOOGLE_TCMALLOC,
            Self::Mimalloc => &registry::MIMALLOC,
            Self::Snmalloc => &registry::SNMALLOC,
            Self::Pymalloc => &registry::PYMALLOC,
            Self::Other => &registry::OTHER,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// Its name for people: with its runtime's, if it has one.
    #[must_use]
    pub fn title(self) -> String {
        let name = self.name();
        self.row().runtime.map_or_else(|| name.to_owned(), |runtime| format!("{runtime} ({name})"))
    }

    /// The allocator with a name from a profile or sample, which may have a suffix; `None` for an unknown one.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        registry::ALL.iter().find(|row| name.starts_with(row.name)).map(|row| row.allocator)
    }

    /// The allocator whose library has a file name, without directories; `None` for an unknown one.
    #[must_use]
    pub fn of_library(name: &str) -> Option<Self> {
        let has = |row: &&&Row| row.libraries.iter().any(|prefix| name.starts_with(prefix));
        registry::ALL.iter().find(has).map(|row| row.allocator)
    }

    /// All of them except [`Allocator::Other`], in the order in which they are listed.
    pub fn known() -> impl Iterator<Item = Self> {
        registry::ALL.iter().map(|row| row.allocator).filter(|allocator| *allocator != Self::Other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_that_of_its_allocator_and_is_found_by_its_name() {
        for row in registry::ALL {
            assert_eq!(row.allocator.row().name, row.name);
            assert_eq!(Allocator::of_name(row.name), Some(row.allocator));
            assert_eq!(serde_json::to_value(row.allocator).ok(), Some(row.name.into()));
        }
        assert_eq!(Allocator::of_name("jemalloc (je_)"), Some(Allocator::Jemalloc));
        assert_eq!(Allocator::of_name("Hoard"), None);
    }
}
