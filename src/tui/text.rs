//! A sample as plain text, for a pipe or a file. Pure.

use std::fmt::Write as _;

use super::sample::{ProcessSample, Sample, SortKey, StackSample, rank};
use super::words;
use crate::profile::Frame;
use crate::profile::page::place;
use crate::sanitize;
use crate::units::grouped;

/// Stacks shown of a process.
const STACKS_SHOWN: usize = 20;
/// Callers shown of a stack.
const CALLERS_SHOWN: usize = 3;

/// The text of a sample, ending in a newline.
pub fn page(sample: &Sample, by: SortKey) -> String {
    let mut page = String::new();
    for process in &sample.processes {
        self::process(&mut page, sample, process, by);
    }
    page
}

fn process(page: &mut String, sample: &Sample, process: &ProcessSample, by: SortKey) {
    let _ = writeln!(page, "{:<1$}{2}", "process", words::LABEL_COLUMNS, words::title(sample, process));
    for line in words::figures(sample, process) {
        let _ = writeln!(page, "{:<1$}{2}", line.label, words::LABEL_COLUMNS, line.text);
    }
    page.push('\n');
    let mut stacks: Vec<&StackSample> = process.stacks.iter().collect();
    rank(&mut stacks, by);
    let heads = words::STACK_HEADS.map(|(head, _)| head);
    let _ = writeln!(page, "{}STACK (by {})", words::aligned(&words::STACK_HEADS, heads), by.words());
    for stack in stacks.iter().take(STACKS_SHOWN) {
        self::stack(page, stack, process.totals.inuse_bytes);
    }
    let more = process.stacks_with_value.saturating_sub(STACKS_SHOWN.min(stacks.len()));
    if more > 0 {
        let _ = writeln!(page, "{} more stacks", grouped(more as u64));
    }
    page.push('\n');
}

fn stack(page: &mut String, stack: &StackSample, total_bytes: u64) {
    let columns = words::stack_columns(stack, total_bytes);
    let numbers = words::aligned(&words::STACK_HEADS, columns.iter().map(String::as_str));
    let indent = numbers.chars().count();
    let title = stack.named.title().map_or_else(|| "[not named yet]".to_owned(), frame);
    let _ = writeln!(page, "{numbers}{title}");
    for caller in stack.named.callers().iter().take(CALLERS_SHOWN) {
        let _ = writeln!(page, "{:indent$}  ← {}", "", frame(caller));
    }
    let more = stack.named.callers().len().saturating_sub(CALLERS_SHOWN);
    if more > 0 {
        let _ = writeln!(page, "{:indent$}  … {more} more", "");
    }
}

/// A frame with its location, safe to show.
pub fn frame(frame: &Frame) -> String {
    let place = place(frame);
    let name = sanitize::terminal(&frame.function);
    if place.is_empty() { name.into_owned() } else { format!("{name}  {place}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tui::testing;

    #[test]
    fn a_page_has_each_process_with_its_figures_and_stacks() {
        insta::assert_snapshot!(page(&testing::shop(), SortKey::Live));
    }

    #[test]
    fn no_escape_sequence_of_a_process_reaches_the_page() {
        let mut sample = testing::shop();
        sample.processes[0].comm = "a\u{1b}]0;x\u{7}".into();
        assert!(!page(&sample, SortKey::Live).contains(|c: char| c.is_control() && c != '\n'));
    }
}
