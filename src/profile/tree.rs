//! The flame graph as a tree: one node per function and path from the root, with its own value and the total with its callees, without the
//! allocator's own frames at the leaf. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::glue;
use super::kind::ValueKind;
use super::model::{Profile, Stack};
use crate::sanitize;

/// Most nodes of one tree: more than any screen shows, and a few MiB of JSON. The others are counted in `pruned_nodes`.
pub const NODES_MAX: usize = 20_000;

/// One function on one path from the root.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Node {
    /// Function, made safe to show.
    pub name: String,
    /// Source file of the first call seen here; empty = not known.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub file: String,
    /// Source line in `file`; 0 = not known.
    #[serde(skip_serializing_if = "is_zero", default)]
    pub line: u32,
    /// Mapped file of the function; empty = not known.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub module: String,
    /// Whether it is allocation code of a library or of the allocator, not of the program.
    #[serde(skip_serializing_if = "std::ops::Not::not", default)]
    pub allocates: bool,
    /// Value of this node and everything it called.
    pub total: u64,
    /// The part of stacks that end here.
    #[serde(rename = "self")]
    pub own: u64,
    /// The functions it called, largest first.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub children: Vec<Node>,
}

fn is_zero(line: &u32) -> bool {
    *line == 0
}

/// A tree, with the number of nodes left out.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Tree {
    /// The root: its total is the sum over all stacks.
    pub root: Node,
    /// Nodes left out because they are smaller than requested, or beyond the limit; their values are included in their callers.
    pub pruned_nodes: u64,
}

/// A node while it is built: children by name.
#[derive(Default)]
struct Building {
    frame: Option<usize>,
    total: u64,
    own: u64,
    children: HashMap<String, usize>,
}

/// Builds the tree of a kind. Nodes below `min_ratio` of the whole are left out and counted.
pub fn build(profile: &Profile, kind: ValueKind, min_ratio: f64) -> Tree {
    let mut nodes = vec![Building::default()];
    for stack in profile.stacks().iter().filter(|stack| stack.values.get(kind) > 0) {
        add(&mut nodes, profile, stack, stack.values.get(kind));
    }
    let all = nodes.first().map_or(0, |root| root.total);
    let least = (all as f64 * min_ratio.clamp(0.0, 1.0)).ceil() as u64;
    // The largest nodes are kept: a caller's total is never below its callee's, so what is kept is a tree.
    let mut totals: Vec<u64> = nodes.iter().map(|node| node.total).collect();
    totals.sort_unstable_by(|a, b| b.cmp(a));
    let least = least.max(totals.get(NODES_MAX).map_or(0, |&total| total.saturating_add(1))).max(1);
    let mut tree = Tree { root: Node::default(), pruned_nodes: 0 };
    tree.root = finish(&nodes, 0, "all".into(), profile, least, &mut tree.pruned_nodes);
    tree
}

fn add(nodes: &mut Vec<Building>, profile: &Profile, stack: &Stack, value: u64) {
    let mut at = 0;
    let mark = stack.truncated.as_ref().map(|reason| format!("[truncated: {}]", sanitize::terminal(reason)));
    let own = glue::allocator_frames(profile.frames_of(stack));
    let frames = stack.frames.iter().skip(own).rev().map(|id| (Some(id.index()), None));
    for (frame, name) in mark.map(|mark| (None, Some(mark))).into_iter().chain(frames) {
        if let Some(node) = nodes.get_mut(at) {
            node.total = node.total.saturating_add(value);
        }
        let name = name.unwrap_or_else(|| {
            let function = frame.and_then(|index| profile.frames().get(index)).map_or("", |frame| &*frame.function);
            sanitize::terminal(function).into_owned()
        });
        let next = nodes.len();
        let Some(node) = nodes.get_mut(at) else { return };
        let child = *node.children.entry(name).or_insert(next);
        if child == next {
            nodes.push(Building { frame, ..Building::default() });
        }
        at = child;
    }
    if let Some(node) = nodes.get_mut(at) {
        node.total = node.total.saturating_add(value);
        node.own = node.own.saturating_add(value);
    }
}

/// The depth is bounded by the number of frames of a stack, which the recorder limits.
fn finish(nodes: &[Building], index: usize, name: String, profile: &Profile, least: u64, pruned: &mut u64) -> Node {
    let Some(node) = nodes.get(index) else { return Node::default() };
    let frame = node.frame.and_then(|frame| profile.frames().get(frame));
    let mut kept = Vec::new();
    for (name, &child) in &node.children {
        if nodes.get(child).is_some_and(|child| child.total >= least) {
            kept.push(finish(nodes, child, name.clone(), profile, least, pruned));
        } else {
            *pruned += 1;
        }
    }
    kept.sort_by(|a, b| b.total.cmp(&a.total).then_with(|| a.name.cmp(&b.name)));
    Node {
        name,
        file: frame.map(|frame| sanitize::terminal(&frame.file).into_owned()).unwrap_or_default(),
        line: frame.map_or(0, |frame| frame.line),
        module: frame.map(|frame| sanitize::terminal(&frame.module).into_owned()).unwrap_or_default(),
        allocates: frame.is_some_and(glue::is_allocation_code),
        total: node.total,
        own: node.own,
        children: kept,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::profile::Values;
    use crate::profile::testing::frame;

    fn profile(stacks: &[(&[&str], u64)]) -> Profile {
        let mut profile = Profile::default();
        for (names, value) in stacks {
            let frames: Vec<_> = names.iter().map(|name| frame(name, 1)).collect();
            profile.add(1, &frames, None, &Values::default().with(ValueKind::InuseSpace, *value));
        }
        profile
    }

    #[test]
    fn callers_have_the_sum_of_their_callees_and_of_their_own_allocations() {
        let profile = profile(&[(&["malloc", "load", "main"], 70), (&["malloc", "main"], 10), (&["malloc", "index", "load", "main"], 20)]);
        let tree = build(&profile, ValueKind::InuseSpace, 0.0);
        let main = &tree.root.children[0];
        assert_eq!((tree.root.total, main.name.as_str(), main.total, main.own), (100, "main", 100, 10));
        let children: Vec<_> = main.children.iter().map(|node| (node.name.as_str(), node.total, node.own)).collect();
        assert_eq!(children, [("load", 90, 70)]);
    }

    #[test]
    fn small_nodes_are_left_out_and_counted() {
        let profile = profile(&[(&["a", "main"], 990), (&["b", "c", "main"], 10)]);
        let tree = build(&profile, ValueKind::InuseSpace, 0.05);
        assert_eq!((tree.pruned_nodes, tree.root.children[0].total, tree.root.children[0].children.len()), (1, 1000, 1));
    }

    proptest! {
        #[test]
        fn the_root_has_the_profiles_total_and_no_callee_exceeds_its_caller(
            stacks in proptest::collection::vec((proptest::collection::vec("[abc]", 1..6), 1u64..1000), 0..30),
        ) {
            let mut profile = Profile::default();
            for (names, value) in &stacks {
                let frames: Vec<_> = names.iter().map(|name| frame(name, 1)).collect();
                profile.add(1, &frames, None, &Values::default().with(ValueKind::InuseSpace, *value));
            }
            let tree = build(&profile, ValueKind::InuseSpace, 0.0);
            prop_assert_eq!(tree.root.total, stacks.iter().map(|(_, value)| value).sum::<u64>());
            fn check(node: &Node) -> bool {
                let called: u64 = node.children.iter().map(|child| child.total).sum();
                called + node.own == node.total && node.children.iter().all(check)
            }
            prop_assert!(check(&tree.root));
        }
    }
}
