//! The memory of a managed runtime, by part: what the runtime itself has, beside what it takes from malloc.

use schemars::JsonSchema;
use serde::Serialize;

use crate::census::Census;

/// One part of a runtime's memory. What is not known is absent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, JsonSchema)]
pub struct Part {
    /// Its name: `java_heap`, `class_space`, `metaspace`, `class_archive`, `code_cache`, `thread_stacks`, `gc_tables`, `direct_buffers`,
    /// `mapped_buffers`, `pymalloc_arenas`, `malloc`, `mmapped`.
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

    /// The part that grew most; of a part and one within it that has most of its growth, the inner one, which says more.
    fn grown(&self) -> Option<&'static str> {
        let growth = |part: &Part| part.delta_bytes.unwrap_or(0);
        let most = self.parts.iter().filter(|part| part.within.is_none()).max_by_key(|part| growth(part))?;
        if growth(most) < GROWTH_MIN_BYTES {
            return None;
        }
        let inner = self.parts.iter().filter(|part| part.within == Some(most.name)).max_by_key(|part| growth(part));
        Some(inner.filter(|inner| 2 * growth(inner) > growth(most)).unwrap_or(most).name)
    }
}

/// malloc's part of a process: its heaps, and the blocks with mappings of their own within them.
pub fn malloc(census: &Census) -> Vec<Part> {
    let ladder = census.ladder();
    let mmapped = |of: fn(&crate::census::HeapAccount) -> u64| census.heaps.iter().map(of).fold(0, u64::saturating_add);
    let heaps = Part {
        name: "malloc",
        reserved_bytes: Some(ladder.extent_bytes),
        resident_bytes: Some(ladder.resident_bytes),
        used_bytes: ladder.live_bytes,
        count: census.sum(|heap| heap.live_allocations),
        source: "the allocator's own data, read by a census",
        ..Part::default()
    };
    let own = Part {
        name: "mmapped",
        used_bytes: Some(mmapped(|heap| heap.mmapped_bytes)),
        count: Some(mmapped(|heap| heap.mmapped_allocations)),
        within: Some("malloc"),
        source: "blocks with mappings of their own, by the allocator's own data",
        ..Part::default()
    };
    vec![heaps, own]
}

/// A Python's memory: CPython's arenas for objects of up to 512 bytes, and malloc. `None` if it has no such arenas.
#[must_use]
pub fn python(census: &Census) -> Option<Account> {
    let arenas = census.runtimes.memory.iter().find(|one| one.kind == "pymalloc_arenas")?;
    let mut parts = vec![Part {
        name: arenas.kind,
        reserved_bytes: Some(arenas.extent_bytes),
        resident_bytes: Some(arenas.resident_bytes),
        used_bytes: arenas.used_bytes,
        count: Some(arenas.pieces),
        source: "CPython's table of arenas and the heads of its pools",
        ..Part::default()
    }];
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
        let first = account(&[("java_heap", 100, None), ("malloc", 50, None), ("direct_buffers", 10, Some("malloc"))]);
        let of = |parts| account(parts).since(&first);
        assert_eq!(
            of(&[("java_heap", 100, None), ("malloc", 90, None), ("direct_buffers", 45, Some("malloc"))]).grew_most,
            Some("direct_buffers")
        );
        assert_eq!(of(&[("java_heap", 100, None), ("malloc", 90, None), ("direct_buffers", 20, Some("malloc"))]).grew_most, Some("malloc"));
        let heap = of(&[("java_heap", 190, None), ("malloc", 40, None), ("direct_buffers", 45, Some("malloc"))]);
        assert_eq!((heap.grew_most, heap.parts[1].delta_bytes), (Some("java_heap"), Some(-(10 << 20))));
        assert_eq!(first.clone().since(&first).grew_most, None);
        // A part that was not there before has no change.
        assert_eq!(of(&[("code_cache", 400, None)]).grew_most, None);
    }
}
