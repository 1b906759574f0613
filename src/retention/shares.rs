//! All blocks in groups by root, owner and type. Each block is in one group, so that the sums over the groups are those of the heap.

use std::collections::HashMap;

use super::contents::Content;
use super::describe::Describer;
use super::holdings::{By, Holdings, Sums};
use super::suspects::NearestOwner;
use crate::profile::Frame;

/// Most groups reported; the smallest are summed by owner.
const GROUPS_MAX: usize = 1000;
/// Most groups while counting; further blocks count in their owner's remainder.
const COUNTED_MAX: usize = 1 << 18;

/// Blocks with the same root, owner and type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The root from which they are reached first; empty if roots are not named.
    pub root: String,
    /// A description of the block that owns them; empty if none does.
    pub owner: String,
    /// Their type and size.
    pub kind: String,
    /// Their sums.
    pub sums: Sums,
    /// Of the pinned bytes, those on pages on which no other group's blocks live: at most so many could be given back if only these blocks
    /// were elsewhere. 0 unless ranked by pinned bytes.
    pub pinned_alone_bytes: u64,
}

impl Share {
    /// Type, owner and root as frames, the type first.
    #[must_use]
    pub fn frames(&self) -> Vec<Frame> {
        let root = if self.root.is_empty() { "[roots are not named]" } else { &self.root };
        let owner = if self.owner.is_empty() { "[no single owner]" } else { &self.owner };
        [self.kind.as_str(), owner, root].map(Frame::named).to_vec()
    }

    /// A description: type, owner, and the root from which they are reached first.
    #[must_use]
    pub fn words(&self) -> String {
        let owner = if self.owner.is_empty() { String::new() } else { format!("; owned by {}", self.owner) };
        let root = if self.root.is_empty() { String::new() } else { format!("; reached first from {}", self.root) };
        format!("{}{owner}{root}", self.kind)
    }
}

/// The type of a group's blocks, while counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum What {
    /// The label with this number, of blocks of this size.
    Label(u32, u64),
    /// Anything else.
    Other,
}

/// The owner or root of a group's blocks, while counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Holder {
    /// The owner with this number.
    Owner(u32),
    /// No owner; the root with this number.
    Root(u32),
    /// None: no pointer was seen.
    None,
}

/// All blocks in groups.
#[derive(Debug, Default)]
pub struct Shares {
    /// The groups, those with most first.
    pub groups: Vec<Share>,
    /// By block: its group.
    group_of: Vec<u32>,
}

impl Shares {
    /// Groups the blocks in use, ranked `by`. `firsts` are their first words.
    pub fn of(describer: &mut Describer<'_>, by: By, firsts: &[u64]) -> Self {
        let holdings = describer.holdings;
        let owners = owners(holdings, by);
        let mut labels = Labels::default();
        let mut places = RootNames::default();
        let mut known: HashMap<(Holder, What), u32> = HashMap::new();
        let mut keys: Vec<((Holder, What), Sums)> = Vec::new();
        let mut group_of = vec![u32::MAX; holdings.len() as usize];
        for block in (0..holdings.len()).filter(|&block| holdings.blocks.live.get(block)) {
            let whose = match owners.get(block) {
                Some(owner) => Holder::Owner(owner),
                None if !holdings.is_reached(block) => Holder::None,
                None => Holder::Root(places.of(describer, block)),
            };
            let label = labels.of(describer, block, firsts.get(block as usize).copied().unwrap_or(0));
            let mut key = (whose, What::Label(label, holdings.blocks.index.size(block)));
            if known.len() >= COUNTED_MAX && !known.contains_key(&key) {
                key.1 = What::Other;
            }
            let group = *known.entry(key).or_insert_with(|| {
                keys.push((key, Sums::default()));
                keys.len() as u32 - 1
            });
            if let (Some((_, sums)), Some(own)) = (keys.get_mut(group as usize), group_of.get_mut(block as usize)) {
                sums.add(&holdings.alone(block));
                *own = group;
            }
        }
        let mut shares = Self { groups: Vec::new(), group_of };
        shares.tell(describer, by, keys, &labels, &places);
        shares
    }

    /// Names the largest groups and sums the others by owner.
    fn tell(&mut self, describer: &mut Describer<'_>, by: By, keys: Vec<((Holder, What), Sums)>, labels: &Labels, places: &RootNames) {
        let mut order: Vec<u32> = (0..keys.len() as u32).collect();
        let rank = |group: &u32| keys.get(*group as usize).map(|(key, sums)| (std::cmp::Reverse((sums.by(by), sums.bytes)), *key));
        order.sort_by_key(rank);
        let mut final_of = vec![0u32; keys.len()];
        let mut told: HashMap<(Holder, What), u32> = HashMap::new();
        for (rank, &group) in order.iter().enumerate() {
            let Some(&((mut whose, mut what), sums)) = keys.get(group as usize) else { continue };
            if rank >= GROUPS_MAX {
                what = What::Other;
                // Blocks without an owner may have many roots.
                if let Holder::Root(_) = whose {
                    whose = Holder::Root(u32::MAX);
                }
            }
            let next = self.groups.len() as u32;
            let place = *told.entry((whose, what)).or_insert(next);
            if place == next {
                let (root, owner) = match whose {
                    Holder::Owner(owner) => (describer.root_name(owner), describer.owner_words(owner)),
                    Holder::Root(place) => (places.name(place), String::new()),
                    Holder::None => ("nowhere: no pointer was seen".to_owned(), String::new()),
                };
                let kind = match what {
                    What::Label(label, size) => format!("{}, {size} B", labels.name(label)),
                    What::Other => "others".to_owned(),
                };
                self.groups.push(Share { root, owner, kind, sums: Sums::default(), pinned_alone_bytes: 0 });
            }
            if let Some(share) = self.groups.get_mut(place as usize) {
                share.sums.add(&sums);
            }
            if let Some(own) = final_of.get_mut(group as usize) {
                *own = place;
            }
        }
        for own in &mut self.group_of {
            *own = final_of.get(*own as usize).copied().unwrap_or(u32::MAX);
        }
    }

    /// The group of a block in use.
    #[must_use]
    pub fn group_of(&self, block: u32) -> Option<u32> {
        self.group_of.get(block as usize).copied().filter(|&group| (group as usize) < self.groups.len())
    }
}

/// The owner of every block, ranked `by`.
#[must_use]
pub fn owners(holdings: &Holdings, by: By) -> NearestOwner {
    let value = |block| holdings.with_all(block).by(by);
    NearestOwner::of(&holdings.tree, value, |block| holdings.blocks.index.size(block), holdings.total().by(by))
}

/// Labels of blocks, by their first words, as numbers.
#[derive(Default)]
struct Labels {
    of_word: HashMap<u64, u32>,
    of_content: HashMap<Content, u32>,
    of_trait_object: HashMap<u32, u32>,
    names: Vec<String>,
}

impl Labels {
    fn of(&mut self, describer: &mut Describer<'_>, block: u32, word: u64) -> u32 {
        let objects = &describer.holdings.trait_objects;
        if let Some(number) = objects.number_of(block) {
            let next = self.names.len() as u32;
            let label = *self.of_trait_object.entry(number).or_insert(next);
            if label == next {
                self.names.push(objects.name(number).to_owned());
            }
            return label;
        }
        if let Some(&label) = self.of_word.get(&word) {
            return label;
        }
        let kind = describer.contents.kind(&word.to_le_bytes());
        let next = self.names.len() as u32;
        let label = match kind.content {
            Content::StaticPointer => *self.of_word.entry(word).or_insert(next),
            content => *self.of_content.entry(content).or_insert(next),
        };
        if label == next {
            let words = match kind.content {
                Content::StaticPointer => kind.words(),
                content => format!("begins with {}", content.first_word()),
            };
            self.names.push(words);
        }
        label
    }

    fn name(&self, label: u32) -> &str {
        self.names.get(label as usize).map_or("", String::as_str)
    }
}

/// Names of roots, as numbers.
#[derive(Default)]
struct RootNames {
    of_slot: HashMap<u64, u32>,
    of_name: HashMap<String, u32>,
    names: Vec<String>,
}

impl RootNames {
    fn of(&mut self, describer: &mut Describer<'_>, block: u32) -> u32 {
        let slot = describer.holdings.origin(block).unwrap_or(u64::MAX);
        if let Some(&place) = self.of_slot.get(&slot) {
            return place;
        }
        let name = describer.root_name(block);
        let next = self.names.len() as u32;
        let place = *self.of_name.entry(name.clone()).or_insert(next);
        if place == next {
            self.names.push(name);
        }
        self.of_slot.insert(slot, place);
        place
    }

    fn name(&self, place: u32) -> String {
        self.names.get(place as usize).cloned().unwrap_or_else(|| "many roots".to_owned())
    }
}
