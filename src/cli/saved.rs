//! `report --by pinned --trace`: what would be saved if the blocks of a stack were not made, by replays of the trace without them.
//!
//! Pinned bytes are charged to all blocks on a page; neighbours may pin the same pages, and then less is saved, or more pages come free
//! than the stack's own. Only the replay tells.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde::Serialize;

use super::replaying::Replayer;
use crate::error::{ExitStatus, Failed};
use crate::profile::text::Column;
use crate::profile::{Profile, ValueKind, rows};
use crate::replay::causes::Saved;
use crate::replay::forecast::REFUSED_PERCENT;
use crate::replay::{Blocks, Calibration, Figures, Setting};
use crate::trace::Names;
use crate::units::HumanBytes;

/// Rows of the table that are replayed, unless fewer are shown: each takes a replay.
const ROWS_MAX: usize = 5;

/// What replays without the blocks of stacks save.
#[derive(Debug, Serialize)]
pub(super) struct SavedWithout {
    /// The largest error of the replay of all blocks against the recorded process; `null` if it was not compared.
    calibration_error_ratio: Option<f64>,
    rows: Vec<SavedRow>,
}

/// A row of the table: stacks that read the same.
#[derive(Debug, Serialize)]
struct SavedRow {
    /// Functions, the one that allocated first.
    functions: Vec<String>,
    pinned_bytes: u64,
    /// Stacks of the trace that were left out.
    stacks: usize,
    /// Resident bytes that were saved; `null` if the trace does not have the stack, or the replay ended early.
    saved: Option<Saved>,
}

/// Replays the trace without the blocks of the first rows. `shown`: how many rows are shown, and with how many callers.
///
/// # Errors
/// If the trace is of another process, cannot be replayed, or its replay is too far from the recorded process.
pub(super) fn of(profile: &Profile, trace: &Path, (top, callers): (usize, usize)) -> anyhow::Result<SavedWithout> {
    let mut replayer = Replayer::open(trace, None, None)?;
    let header = replayer.survey.header.clone();
    let of_pid = |pid: u32| pid == 0 || pid == header.pid;
    let usage = |text: String| Failed::new(ExitStatus::Usage, format!("{}: {text}", trace.display()));
    if !profile.meta.processes.iter().any(|process| of_pid(process.pid)) {
        return Err(usage(format!("it is the trace of process {} ({}), which is not in the profile", header.pid, header.comm)).into());
    }
    let (today, _) = Setting::today(&header, replayer.survey.end.as_ref(), header.cpus);
    let times = replayer.compared();
    let first = replayer.replay_all(&today, times)?;
    if let Some(reason) = &first.stopped {
        return Err(usage(format!("its replay under today's settings ended early: {reason}")).into());
    }
    let off = Calibration::of(&replayer.survey, &first).error_percent();
    if let Some(off) = off.filter(|off| off.abs() > REFUSED_PERCENT) {
        return Err(usage(format!("its replay differs from the recorded process by {off:+.0} %: what would be saved is not known")).into());
    }
    let now = Figures::of(&first.resident());
    let names = replayer.survey.names.clone();
    let numbers = by_functions(&names);
    let mut out = SavedWithout { calibration_error_ratio: off.map(|percent| percent / 100.0), rows: Vec::new() };
    for row in rows::ranked(profile, ValueKind::PinnedSpace, callers).iter().take(top.min(ROWS_MAX)) {
        let functions: Vec<String> = row.frames.iter().map(|frame| frame.function.to_string()).collect();
        let of_stack = |stack: &&crate::profile::Stack| {
            let names: Vec<&str> = profile.frames_of(stack).map(|frame| &*frame.function).collect();
            numbers.get(&names).cloned().unwrap_or_default()
        };
        let stacks: HashSet<u32> = row.stacks.iter().filter(|stack| of_pid(stack.pid) && !row.is_rest).flat_map(of_stack).collect();
        let mut saved = None;
        let count = stacks.len();
        if count > 0 {
            let rest = replayer.replay_blocks(&today, Blocks::Without(stacks), functions.first().map_or("", String::as_str))?;
            saved = rest.stopped.is_none().then(|| Saved::between(now, Figures::of(&rest.resident())));
        }
        out.rows.push(SavedRow { functions, pinned_bytes: row.values.get(ValueKind::PinnedSpace), stacks: count, saved });
    }
    Ok(out)
}

/// The numbers of a trace's stacks by their functions.
fn by_functions(names: &Names) -> HashMap<Vec<&str>, Vec<u32>> {
    let mut numbers: HashMap<Vec<&str>, Vec<u32>> = HashMap::new();
    for stack in 0..names.stacks() {
        let functions: Vec<&str> = names.functions_of(stack).collect();
        if !functions.is_empty() {
            numbers.entry(functions).or_default().push(stack);
        }
    }
    numbers
}

impl SavedWithout {
    /// The column of the text.
    pub(super) fn column(&self, trace: &Path) -> Column {
        let cell = |row: &SavedRow| match row.saved {
            Some(saved) if saved.end_bytes < 0 => format!("−{}", HumanBytes(saved.end_bytes.unsigned_abs())),
            Some(saved) => HumanBytes(saved.end_bytes.unsigned_abs()).to_string(),
            None => "?".to_owned(),
        };
        let calibration = self
            .calibration_error_ratio
            .map_or_else(|| "not compared with the recorded process".to_owned(), |ratio| format!("{:+.1} %", ratio * 100.0));
        Column {
            head: "WITHOUT IT",
            cells: self.rows.iter().map(cell).collect(),
            note: format!(
                "WITHOUT IT: resident bytes that would be saved at the end if these blocks were not made, by replays of {}; calibration: \
                 {calibration}; not replayed beyond the first {ROWS_MAX} rows",
                trace.display()
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::NamesWriter;

    #[test]
    fn stacks_of_a_trace_are_found_by_their_functions() {
        let mut names = NamesWriter::default();
        let [malloc, load, main] = ["malloc", "load", "main"].map(|name| names.function(name.to_owned()));
        for stack in [&[malloc, load, main][..], &[], &[malloc, load, main], &[malloc, 9]] {
            names.stack(stack);
        }
        let names = names.finish();
        let numbers = by_functions(&names);
        assert_eq!(numbers.get(&vec!["malloc", "load", "main"]), Some(&vec![0, 2]));
        assert_eq!(numbers.get(&vec!["malloc", "?"]), Some(&vec![3]));
        assert_eq!(numbers.len(), 2);
    }

    #[test]
    fn what_is_not_known_is_a_question_mark_and_what_costs_memory_is_negative() {
        let row = |saved: Option<i64>| SavedRow {
            functions: Vec::new(),
            pinned_bytes: 7,
            stacks: 1,
            saved: saved.map(|end_bytes| Saved { peak_bytes: 0, mean_bytes: 0, end_bytes }),
        };
        let saved = SavedWithout { calibration_error_ratio: Some(0.003), rows: vec![row(Some(2 << 20)), row(Some(-1024)), row(None)] };
        let column = saved.column(Path::new("app.fpt"));
        assert_eq!(column.cells, ["2.00 MiB", "−1.00 KiB", "?"]);
        assert!(column.note.contains("+0.3 %"), "{}", column.note);
    }
}
