//! Memory that language runtimes and databases manage themselves, outside malloc, read from their own data. Nothing is stopped or injected.
//!
//! A runtime's structures are found in its own data or at the start of its pieces, and must be consistent with each other and with the
//! mappings; otherwise the memory is not attributed. Kinds that rest only on the shape or order of mappings are named `likely_`.

pub mod go;
pub mod hotspot;
pub mod innodb;
pub mod pymalloc;
pub mod ruby;
pub mod v8;
pub mod view;
pub mod zend;

use std::ops::Range;

use serde::Serialize;

use self::hotspot::JavaMemory;
use self::view::View;
use super::memory::Memory;
use super::objects::{Objects, joined, without};
use super::page_cache::PageCache;
use crate::process::Maps;

/// The use of memory outside malloc.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// CPython's arenas for objects of up to 512 bytes.
    Pymalloc,
    /// The Go runtime's heap, including goroutines' stacks.
    Go,
    /// Other memory of a Go program without C library: most likely the runtime's own tables.
    GoRuntime,
    /// V8's pages of objects.
    V8,
    /// The memory of PHP's own allocator.
    Zend,
    /// Ruby's pages of objects.
    Ruby,
    /// InnoDB's buffer pool.
    InnoDb,
    /// The Java heap.
    JavaHeap,
    /// The JVM's compressed class space.
    JavaClasses,
    /// The JVM's other class metadata, most likely.
    JavaMetaspace,
}

impl Kind {
    /// Its name in JSON and metrics; `likely_…` where the shape or order of mappings suggests it and no data of the owner says so.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pymalloc => "pymalloc_arenas",
            Self::Go => "go_heap",
            Self::GoRuntime => "likely_go_runtime",
            Self::V8 => "v8_heap",
            Self::Zend => "zend_memory",
            Self::Ruby => "ruby_heap",
            Self::InnoDb => "innodb_buffer_pool",
            Self::JavaHeap => "java_heap",
            Self::JavaClasses => "java_classes",
            Self::JavaMetaspace => "likely_java_metaspace",
        }
    }
}

/// Memory of the runtimes in a process; absent = no such runtime, or it could not be read.
#[derive(Debug, Clone, PartialEq, Default, Serialize, schemars::JsonSchema)]
pub struct Runtimes {
    /// A Java virtual machine (HotSpot).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub java: Option<JavaMemory>,
    /// The memory that each runtime manages itself, by kind. Not at level `top`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub memory: Vec<RuntimeMemory>,
}

/// Memory that a runtime manages itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct RuntimeMemory {
    /// Its kind, as in `not_malloc`: `pymalloc_arenas`, `go_heap`, `v8_heap`, `zend_memory`, `ruby_heap`, `innodb_buffer_pool`, …
    pub kind: &'static str,
    /// Pieces (arenas, pages, chunks) of it.
    pub pieces: u64,
    /// Address space of the pieces, in bytes.
    pub extent_bytes: u64,
    /// Of the extent, in RAM, in bytes.
    pub resident_bytes: u64,
    /// Of the extent, in swap, in bytes.
    pub swapped_bytes: u64,
    /// Bytes in use by the runtime's own data; absent = not known. CPython: blocks in use in resident pools. PHP: `memory_get_usage()`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Where the pieces lie.
    #[serde(skip)]
    ranges: Vec<Range<u64>>,
    #[serde(skip)]
    kind_of: Kind,
}

impl Runtimes {
    /// Whether memory of this kind was found.
    #[must_use]
    pub fn has(&self, kind: Kind) -> bool {
        self.memory.iter().any(|one| one.kind_of == kind)
    }
}

impl RuntimeMemory {
    fn new(kind: Kind) -> Self {
        Self {
            kind: kind.name(),
            pieces: 0,
            extent_bytes: 0,
            resident_bytes: 0,
            swapped_bytes: 0,
            used_bytes: None,
            ranges: Vec::new(),
            kind_of: kind,
        }
    }

    /// How a recording can see what is in it; `None` = not by recording malloc.
    #[must_use]
    pub fn recorded_by(&self) -> Option<&'static str> {
        match self.kind_of {
            Kind::Pymalloc => Some("record --python-objects does"),
            Kind::Zend => Some("one of a php started with USE_ZEND_ALLOC=0 does"),
            _ => None,
        }
    }

    /// Adds pieces, and what of them is used.
    fn extend(&mut self, found: Option<(Vec<Range<u64>>, Option<u64>)>) {
        let Some((ranges, used)) = found else { return };
        self.ranges.extend(ranges);
        self.used_bytes = match (self.used_bytes, used) {
            (Some(one), Some(other)) => Some(one.saturating_add(other)),
            (one, other) => one.or(other),
        };
    }

    /// Itself, unless nothing was found.
    fn finish(self) -> Option<Self> {
        (!self.ranges.is_empty()).then_some(self)
    }
}

/// A range of addresses whose use is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// What for.
    pub kind: Kind,
    /// Where.
    pub range: Range<u64>,
}

/// What was learned of runtimes' files; keep it for the next process.
#[derive(Debug, Default)]
pub struct LayoutCache {
    /// HotSpot's.
    pub hotspot: hotspot::LayoutCache,
    /// Go's table of arenas.
    pub go: go::LayoutCache,
    /// CPython's table of arenas.
    pub pymalloc: super::pymalloc::arenas::Places,
}

/// Searches for runtimes. `heaps` are malloc's own ranges, sorted and disjoint. The claims are sorted and disjoint, and lie outside of
/// them.
pub fn look(
    memory: &dyn Memory,
    maps: &Maps,
    objects: &Objects<'_>,
    heaps: &[Range<u64>],
    layouts: &mut LayoutCache,
) -> (Runtimes, Vec<Claim>) {
    let view = View::of(memory, maps, objects, heaps);
    let java = hotspot::look(&view, &mut layouts.hotspot);
    let found = [
        pymalloc::find(&view, &mut layouts.pymalloc),
        go::find(&view, &mut layouts.go),
        v8::find(&view),
        zend::find(&view),
        ruby::find(&view),
        innodb::find(&view),
    ];
    let mut claims: Vec<Claim> = Vec::new();
    let mut list = Vec::new();
    for mut found in found.into_iter().flatten() {
        let ranges = claim(&mut claims, heaps, found.kind_of, std::mem::take(&mut found.ranges));
        measure(&mut found, memory, &ranges);
        list.push(found);
    }
    let (java, own) = java.map_or((None, Vec::new()), |(java, own)| (Some(java), own));
    for (kind, ranges) in own {
        claim(&mut claims, heaps, kind, ranges);
    }
    if list.iter().any(|one| one.kind_of == Kind::Go) && !view.has_file(|name| name.starts_with("libc.") || name.starts_with("ld-")) {
        claim(&mut claims, heaps, Kind::GoRuntime, go::rest(&view));
    }
    (Runtimes { java, memory: list }, claims)
}

/// Claims the parts of the ranges that are not claimed yet, and returns them.
fn claim(claims: &mut Vec<Claim>, heaps: &[Range<u64>], kind: Kind, mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let taken: Vec<Range<u64>> = claims.iter().map(|claim| claim.range.clone()).collect();
    let own = without(&without(&joined(&ranges), heaps), &joined(&taken));
    claims.extend(own.iter().map(|range| Claim { kind, range: range.clone() }));
    claims.sort_by_key(|claim| claim.range.start);
    // The pieces, as the runtime has them; claims may be joined.
    ranges
}

fn measure(found: &mut RuntimeMemory, memory: &dyn Memory, ranges: &[Range<u64>]) {
    let mut pages = PageCache::new(memory);
    found.pieces = ranges.len() as u64;
    for range in ranges {
        let residency = pages.residency(range.clone());
        found.extent_bytes = found.extent_bytes.saturating_add(range.end - range.start);
        found.resident_bytes = found.resident_bytes.saturating_add(residency.resident_bytes);
        found.swapped_bytes = found.swapped_bytes.saturating_add(residency.swapped_bytes);
    }
}
