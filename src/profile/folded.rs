//! Folded stacks: one line per stack, root first, frames separated by `;`, then a space and the value. The input of flame-graph tools. The
//! allocator's own frames at the leaf, the same in every stack, are left out.

use std::collections::BTreeMap;
use std::io::{self, Write};

use super::glue;
use super::kind::ValueKind;
use super::model::{Profile, Stack};
use crate::sanitize;

/// The folded lines of a kind, sorted, stacks of the same names added up; stacks without a value are left out.
///
/// With several processes the root frame is the process. A walk that ended early starts at a frame that says so, because its outermost
/// function is not the thread's.
pub fn lines(profile: &Profile, kind: ValueKind) -> Vec<String> {
    sums(profile, kind).into_iter().map(|(stack, value)| format!("{stack} {value}")).collect()
}

/// The same as pairs.
pub fn sums(profile: &Profile, kind: ValueKind) -> BTreeMap<String, u64> {
    let several = profile.meta.processes.len() > 1;
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for stack in profile.stacks().iter().filter(|stack| stack.values.get(kind) > 0) {
        let sum = sums.entry(line(profile, stack, several)).or_default();
        *sum = sum.saturating_add(stack.values.get(kind));
    }
    sums
}

/// Writes the folded lines of a kind.
///
/// # Errors
/// What the writer reports.
pub fn write(profile: &Profile, kind: ValueKind, mut out: impl Write) -> io::Result<()> {
    for line in lines(profile, kind) {
        writeln!(out, "{line}")?;
    }
    out.flush()
}

fn line(profile: &Profile, stack: &Stack, with_process: bool) -> String {
    let mut text = String::new();
    if with_process {
        let comm = profile.meta.process(stack.pid).map_or("", |p| &p.comm);
        text.push_str(&sanitize::folded(&format!("{comm} ({})", stack.pid)));
        text.push(';');
    }
    if let Some(reason) = &stack.truncated {
        text.push_str(&sanitize::folded(&format!("[truncated: {reason}]")));
        text.push(';');
    }
    let own = glue::allocator_frames(profile.frames_of(stack));
    for (i, frame) in profile.frames_of(stack).skip(own).rev().enumerate() {
        if i > 0 {
            text.push(';');
        }
        text.push_str(&sanitize::folded(&frame.function));
    }
    // Readers take a number after a space for the value: in a name that ends in one, the space is replaced by a non-breaking one.
    match text.rsplit_once(' ') {
        Some((rest, last)) if last.parse::<f64>().is_ok() => format!("{rest}\u{a0}{last}"),
        _ => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Values;
    use crate::profile::testing::{frame, shop};

    #[test]
    fn stacks_are_root_first_with_their_process_and_made_safe() {
        assert_eq!(
            lines(&shop(), ValueKind::InuseSpace),
            [
                "shop \"w\"\\u{a} (4243);[truncated: no_table];worker: \\u{1b}[31m<b>\"x\" & y 100",
                "shopd (4242);main;Cache::insert(std::string, std::string);Buffer::grow(unsigned long) 409600",
                "shopd (4242);main;Server::login(Request&);Session::create(User const&) 15728640",
            ]
        );
    }

    #[test]
    fn stacks_that_differ_in_lines_alone_are_one() {
        let mut profile = Profile::default();
        for line in [3, 4] {
            profile.add(0, &[frame("f", line), frame("main", 9)], None, &Values::default().with(ValueKind::InuseSpace, 10));
        }
        assert_eq!(lines(&profile, ValueKind::InuseSpace), ["main;f 20"]);
    }

    #[test]
    fn a_name_that_ends_in_a_number_is_not_taken_for_a_value() {
        let mut profile = Profile::default();
        profile.add(0, &[frame("render 12", 3)], None, &Values::default().with(ValueKind::InuseSpace, 10));
        assert_eq!(lines(&profile, ValueKind::InuseSpace), ["render\u{a0}12 10"]);
    }
}
