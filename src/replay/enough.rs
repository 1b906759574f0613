//! Whether a trace is long enough to pick a setting by, and what would make it so. Pure.

use serde::Serialize;

use super::forecast::{Prediction, TIE_PERCENT};
use super::survey::Survey;
use crate::units::ShortDuration;

/// Changes between busy and quiet that a whole cycle of the load has.
const CHANGES_MIN: usize = 2;

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Enough {
    /// Whether the trace is long enough.
    pub is_enough: bool,
    /// Why, and what would make it so.
    pub why: String,
}

impl Enough {
    fn no(why: String) -> Self {
        Self { is_enough: false, why }
    }

    /// Judges a trace by its load and by what was predicted from it: a whole run of a program is enough; otherwise a whole cycle of the load
    /// must be in it, and the pick must be the same by the first half alone.
    #[must_use]
    pub fn of(survey: &Survey, predictions: &[Prediction]) -> Self {
        let duration = ShortDuration(survey.duration_ns() as f64 / 1e9);
        let earlier = picked_by_half(predictions).filter(|picked| !picked.is_best).map(|picked| &picked.setting);
        if !survey.header.has_times() {
            return Self::no(format!("{} does not tell times: no phase of the load can be seen in it", survey.header.converted_from));
        }
        if survey.is_whole_run() {
            let but = earlier.map(|name| format!("; after half of it {name} would have been the pick: a run of another length may differ"));
            let why = format!("it is a whole run of the program{}", but.unwrap_or_default());
            return Self { is_enough: true, why };
        }
        if let Some(name) = earlier {
            return Self::no(format!(
                "by its first half alone {name} would be the pick: record for more than {duration}, until the pick stays the same when the time \
                 is doubled"
            ));
        }
        let changes = survey.load.changes(survey.ended_ns);
        if changes < CHANGES_MIN {
            let seen = if changes == 0 { "hardly changed" } else { "changed only once between busy and quiet" };
            return Self::no(format!(
                "the pick is that of its first half, but the rate of calls {seen} in {duration}: record a whole cycle of the load with its \
                 quiet part"
            ));
        }
        Self { is_enough: true, why: format!("the pick is that of its first half, and the load became quiet and busy again in {duration}") }
    }
}

/// What would be picked by the first half: today's if nothing is better by more than a tie.
fn picked_by_half(predictions: &[Prediction]) -> Option<&Prediction> {
    let usable = || predictions.iter().filter(|one| one.failed.is_none());
    let best = usable().min_by_key(|one| one.half_mean_bytes)?;
    let today = usable().next()?;
    let is_tie = today.half_mean_bytes as f64 <= best.half_mean_bytes as f64 * (1.0 + TIE_PERCENT / 100.0);
    Some(if is_tie { today } else { best })
}

#[cfg(test)]
mod tests {
    use super::super::forecast::rank;
    use super::super::load::Load;
    use super::super::outcome::{Replay, Sample};
    use super::*;
    use crate::trace::{End, Header};

    const SECOND_NS: u64 = 1_000_000_000;

    fn ranked(means: &[(u64, u64)]) -> Vec<Prediction> {
        let one = |(index, &(bytes, half_mean_bytes)): (usize, &(u64, u64))| {
            let replay = Replay { samples: vec![Sample { time_ns: 0, bytes }], ..Replay::default() };
            Prediction { half_mean_bytes, ..Prediction::of(format!("setting {index}"), Vec::new(), &replay, false, 0.0) }
        };
        let mut all: Vec<Prediction> = means.iter().enumerate().map(one).collect();
        rank(&mut all);
        all
    }

    /// Twelve seconds, quiet in between or not.
    fn survey(has_quiet_part: bool) -> Survey {
        let mut load = Load::from(0);
        for at in 0..12_000 {
            let is_quiet = has_quiet_part && (4000..8000).contains(&at);
            if !is_quiet || at % 20 == 0 {
                load.add(at * SECOND_NS / 1000);
            }
        }
        Survey { load, ended_ns: 12 * SECOND_NS, ..Survey::default() }
    }

    #[test]
    fn a_trace_with_a_whole_cycle_and_an_unchanged_pick_is_long_enough() {
        let same = ranked(&[(1000, 1000), (700, 700)]);
        assert!(Enough::of(&survey(true), &same).is_enough);
        let steady = Enough::of(&survey(false), &same);
        assert!(!steady.is_enough && steady.why.contains("whole cycle"), "{steady:?}");
    }

    #[test]
    fn a_trace_whose_first_half_picks_another_setting_is_too_short() {
        let changed = ranked(&[(1000, 1000), (700, 1100), (900, 500)]);
        let enough = Enough::of(&survey(true), &changed);
        assert!(!enough.is_enough && enough.why.contains("setting 2") && enough.why.contains("12 s"), "{enough:?}");
        // A tie with the pick is no other pick.
        assert!(Enough::of(&survey(true), &ranked(&[(1000, 1000), (700, 700), (705, 690)])).is_enough);
    }

    #[test]
    fn a_whole_run_is_enough_and_a_trace_without_times_never_shows_a_cycle() {
        let changed = ranked(&[(1000, 1000), (700, 1100), (900, 500)]);
        let end = Some(End { has_exited: true, ..End::default() });
        let whole = Survey { end, header: Header { is_from_start: true, ..Header::default() }, ..survey(false) };
        let enough = Enough::of(&whole, &changed);
        assert!(enough.is_enough && enough.why.contains("setting 2"), "{enough:?}");
        let header = Header { converted_from: "a file".into(), lacks: vec!["times".into()], ..Header::default() };
        let timeless = Survey { header, ..survey(true) };
        assert!(!Enough::of(&timeless, &ranked(&[(1000, 1000)])).is_enough);
    }
}
