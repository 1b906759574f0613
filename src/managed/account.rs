//! The memory of a managed runtime, by part: what the runtime itself has, beside what it takes from malloc.

use schemars::JsonSchema;
use serde::Serialize;

use crate::census::{Census, HeapAccount};

/// One part of a runtime's memory. What is not known is absent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct Part {
    /// Its name: `java_heap`, `class_space`, `metaspace`, `class_archive`, `code_cache`, `thread_stacks`, `gc_tables`, `direct_buffers`,
    /// `mapped_buffers`, `pymalloc`, `malloc`, `mmapped`.
    pub name: &'static str,
    /// Address space reserved, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_bytes: Option<u64>,
    /// Of it, what may be used without asking again, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub committed_bytes: Option<u64>,
    /// Of it, in RAM, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
    /// Bytes in use, by the owner's own count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    /// Number of its pieces: threads, buffers, arenas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// The part in which its bytes are counted too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub within: Option<&'static str>,
    /// Change since the first look, in bytes: of what is resident, or else in use, or else committed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delta_bytes: Option<i64>,
    /// Where the numbers come from.
    pub source: &'static str,
}

impl Part {
    /// What its change is measured by.
    fn measured(&self) -> Option<u64> {
        self.resident_bytes.or(self.used_bytes).or(self.committed_bytes)
    }
}

/// A runtime's memory at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct Account {
    /// The runtime: `java`, `python`.
    pub runtime: &'static str,
    /// Its parts, its own first.
    pub parts: Vec<Part>,
    /// The part that grew most between the first look and the last; absent = none, or there was one look only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grew_most: Option<&'static str>,
    /// What cannot be read from outside.
    pub not_known: Vec<&'static str>,
}

/// Smallest growth of a part that is told: a page of each of a few threads comes and goes.
const GROWTH_MIN_BYTES: i64 = 256 << 10;

impl Account {
    /// Enters the changes since an earlier look.
    #[must_use]
    pub fn since(mut self, earlier: &Self) -> Self {
        for part in &mut self.parts {
            let before = earlier.parts.iter().find(|one| one.name == part.name).and_then(Part::measured);
            let delta = |now: u64, before: u64| i64::try_from(i128::from(now) - i128::from(before)).ok();
            part.delta_bytes = part.measured().zip(before).and_then(|(now, before)| delta(now, before));
        }
        self.grew_most = self.grown();
        self
    }

    /// The part that grew most; of a part and those within it that have most of its growth the last, since malloc's own come before the runtime's,
    /// which say more.
    fn grown(&self) -> Option<&'static str> {
        let growth = |part: &Part| part.delta_bytes.unwrap_or(0);
        let most = self.parts.iter().filter(|part| part.within.is_none()).max_by_key(|part| growth(part))?;
        if growth(most) < GROWTH_MIN_BYTES {
            return None;
        }
        let mut inner = self.parts.iter().filter(|part| part.within == Some(most.name) && 2 * growth(part) > growth(most));
        Some(inner.next_back().unwrap_or(most).name)
    }
}

/// A part for heaps that a census has read.
fn of_heaps<'a>(name: &'static str, source: &'static str, heaps: impl Iterator<Item = &'a HeapAccount> + Clone) -> Part {
    let sum = |of: fn(&HeapAccount) -> u64| heaps.clone().map(of).fold(0, u64::saturating_add);
    let known = |of: fn(&HeapAccount) -> Option<u64>| heaps.clone().map(of).try_fold(0, |sum: u64, one| Some(sum.saturating_add(one?)));
    Part {
        name,
        reserved_bytes: Some(sum(|heap| heap.ladder.extent_bytes)),
        resident_bytes: Some(sum(|heap| heap.ladder.resident_bytes)),
        used_bytes: known(|heap| heap.ladder.live_bytes),
        count: known(|heap| heap.live_allocations),
        source,
        ..Part::default()
    }
}

/// malloc's part of a process: its heaps, and the blocks with mappings of their own within them.
pub fn malloc(census: &Census) -> Vec<Part> {
    let heaps = census.heaps.iter().filter(|heap| heap.allocator.row().runtime.is_none());
    let own = Part {
        name: "mmapped",
        used_bytes: Some(heaps.clone().map(|heap| heap.mmapped_bytes).fold(0, u64::saturating_add)),
        count: Some(heaps.clone().map(|heap| heap.mmapped_allocations).fold(0, u64::saturating_add)),
        within: Some("malloc"),
        source: "blocks with mappings of their own, by the allocator's own data",
        ..Part::default()
    };
    vec![of_heaps("malloc", "the allocator's own data, read by a census", heaps), own]
}

/// A Python's memory: CPython's arenas for objects of up to 512 bytes, and malloc. `None` if it has no such arenas.
#[must_use]
pub fn python(census: &Census) -> Option<Account> {
    let own = census.heaps.iter().filter(|heap| heap.allocator.row().runtime == Some("python"));
    let arenas = own.clone().find_map(|heap| heap.pools.as_ref())?.arenas;
    let source = "CPython's table of arenas and the heads of its pools";
    let mut parts = vec![Part { count: Some(arenas), ..of_heaps("pymalloc", source, own) }];
    parts.extend(malloc(census));
    Some(Account { runtime: "python", parts, ..Account::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(parts: &[(&'static str, u64, Option<&'static str>)]) -> Account {
        let part = |&(name, bytes, within): &(&'static str, u64, Option<&'static str>)| Part {
            name,
            resident_bytes: Some(bytes << 20),
            within,
            ..Part::default()
        };
        Account { runtime: "java", parts: parts.iter().map(part).collect(), ..Account::default() }
    }

    #[test]
    fn the_part_that_grew_most_is_named_and_the_inner_one_where_it_explains_the_growth() {
        let (mmapped, direct) = (|mib| ("mmapped", mib, Some("malloc")), |mib| ("direct_buffers", mib, Some("malloc")));
        let first = account(&[("java_heap", 100, None), ("malloc", 50, None), mmapped(10), direct(10)]);
        let of = |parts: &[_]| account(parts).since(&first);
        let grown = |inner: [_; 2]| of(&[("java_heap", 100, None), ("malloc", 90, None), inner[0], inner[1]]).grew_most;
        assert_eq!(grown([mmapped(46), direct(45)]), Some("direct_buffers"));
        assert_eq!(grown([mmapped(46), direct(12)]), Some("mmapped"));
        assert_eq!(grown([mmapped(12), direct(20)]), Some("malloc"));
        let heap = of(&[("java_heap", 190, None), ("malloc", 40, None), direct(45)]);
        assert_eq!((heap.grew_most, heap.parts[1].delta_bytes), (Some("java_heap"), Some(-(10 << 20))));
        assert_eq!(first.clone().since(&first).grew_most, None);
        // A part that was not there before has no change.
        assert_eq!(of(&[("code_cache", 400, None)]).grew_most, None);
    }
}
