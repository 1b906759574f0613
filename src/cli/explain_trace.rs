//! `fragprof explain TRACE`: the verdict on the heap of a replay, with the settings among its remedies replayed too.

use std::path::Path;

use super::replaying::Replayer;
use super::whatif::doubts;
use crate::error::{ExitStatus, Failed};
use crate::fragmentation::verdict::{Change, Remedy, Source, TrendSample, TrendSamples, Verdict, judge};
use crate::replay::causes::Saved;
use crate::replay::forecast::{REFUSED_PERCENT, TIE_PERCENT};
use crate::replay::{Calibration, Figures, Moment, Prediction, Replay, Scenario, Setting};
use crate::units::HumanBytes;

/// A judged trace.
pub(super) struct Judged {
    pub(super) comm: String,
    pub(super) pid: u32,
    pub(super) verdict: Verdict,
}

/// Replays a trace under its own settings, judges the heap near its end, and replays the settings that are remedies.
///
/// # Errors
/// If the trace cannot be replayed, or the heap of its allocator cannot be read.
pub(super) fn judged(path: &Path) -> anyhow::Result<Judged> {
    let mut replayer = Replayer::open(path, None, None)?;
    let header = replayer.survey.header.clone();
    let (today, notes) = Setting::today(&header, replayer.survey.end.as_ref(), header.cpus);
    let even = replayer.even();
    let mut census_at_ns = [even.clone(), replayer.compared()].concat();
    census_at_ns.sort_unstable();
    census_at_ns.dedup();
    let scenario = Scenario {
        environment: today.environment.clone(),
        census_at_ns,
        by_stack_at_ns: even.last().copied(),
        keeps_census: true,
        ..Scenario::default()
    };
    let mut first = replayer.replay(&scenario, &today.label)?;
    let unsupported = |reason: &str| Failed::new(ExitStatus::Unsupported, format!("cannot judge {}: {reason}", path.display()));
    if let Some(reason) = &first.stopped {
        return Err(unsupported(&format!("its replay under today's settings ended early: {reason}")).into());
    }
    let Some(mut census) = first.census.take() else {
        return Err(unsupported("no census can read the heap of its allocator; fragprof whatif compares settings nevertheless").into());
    };
    // Of the replay's process the heap alone is the program's.
    (census.pid, census.comm, census.rss_bytes) = (header.pid, header.comm.clone(), census.ladder().resident_bytes);
    let middle_ns = replayer.survey.began_ns.saturating_add(replayer.survey.duration_ns() / 2);
    let mut verdict = judge(&census, change(&first, middle_ns..=even.last().copied().unwrap_or(0)));
    verdict.unknowns.push("memory outside malloc: a trace does not have it, fragprof explain PID does".to_owned());
    let calibration = Calibration::of(&replayer.survey, &first);
    let off = calibration.error_percent().unwrap_or(0.0);
    let words =
        calibration.error_percent().map_or_else(|| "not compared with the recorded process".to_owned(), |off| format!("{off:+.1} %"));
    verdict.sources = vec![Source::new(
        "heap, in use, trimmable, pinned, change",
        format!("censuses of a replay of the trace under its own settings ({}), in its second half; calibration: {words}", today.label),
    )];
    let doubts = [notes, doubts(&replayer.survey)].concat();
    if !doubts.is_empty() {
        verdict.sources.push(Source::new("trace", doubts.join("; ")));
    }
    if off.abs() > REFUSED_PERCENT {
        verdict.unknowns.push(format!("what settings would save: the replay differs from the recorded process by {off:+.0} %"));
        return Ok(Judged { comm: header.comm, pid: header.pid, verdict });
    }
    for remedy in &mut verdict.remedies {
        // Of another allocator in the process the trace has nothing.
        let setting = remedy.setting.as_deref().and_then(|text| Setting::parse(text, header.cpus).ok());
        let Some(setting) = setting.filter(|setting| setting.allocator == today.allocator && setting.missing.is_none()) else { continue };
        let then = replayer.replay_all(&setting, Vec::new())?;
        *remedy = replayed(remedy, &first, &then, (replayer.survey.has_several_threads(), off));
    }
    verdict.sources.push(Source::new("what settings would save", "replays of the trace under each; fragprof whatif compares more of them"));
    Ok(Judged { comm: header.comm, pid: header.pid, verdict })
}

/// The growth that the censuses of a replay show in a time: in the second half of the trace, up to the census that is judged. Every program's
/// heap grows from nothing at its start.
fn change(replay: &Replay, time_ns: std::ops::RangeInclusive<u64>) -> Option<Change> {
    let mut looks = TrendSamples::new(replay.moments.len());
    let look = |moment: &Moment| {
        let ladder = moment.ladder?;
        let live_bytes = ladder.live_bytes?;
        Some(TrendSample {
            at_s: moment.time_ns as f64 / 1e9,
            live_bytes,
            resident_bytes: ladder.resident_bytes,
            free_bytes: ladder.resident_bytes.checked_sub(live_bytes),
            outside_bytes: 0,
        })
    };
    replay.moments.iter().filter(|moment| time_ns.contains(&moment.time_ns)).filter_map(look).for_each(|look| looks.add(look));
    looks.change()
}

/// A remedy with the effect that its replay had. `(has_threads, off)`: of the trace, and its calibration in percent.
fn replayed(remedy: &Remedy, today: &Replay, then: &Replay, (has_threads, off): (bool, f64)) -> Remedy {
    let prediction = Prediction::of(String::new(), Vec::new(), then, has_threads, off);
    if let Some(reason) = prediction.failed {
        return Remedy { predicted_bytes: None, at_most: false, basis: format!("its replay ended early: {reason}"), ..remedy.clone() };
    }
    let (now, then) = (Figures::of(&today.resident()), prediction.figures);
    let saved = Saved::between(now, then);
    let noise = (now.end_bytes as f64 * TIE_PERCENT / 100.0) as i64;
    let verdict = match saved.end_bytes {
        saved if saved < -noise => "; it would take more",
        saved if saved <= noise => "; within a replay's noise",
        _ => "",
    };
    Remedy {
        predicted_bytes: Some(u64::try_from(saved.end_bytes).unwrap_or(0)),
        at_most: false,
        basis: format!(
            "replayed: {} resident at the end against {}, {} on average against {}, ± {:.0} %{verdict}",
            HumanBytes(then.end_bytes),
            HumanBytes(now.end_bytes),
            HumanBytes(then.mean_bytes),
            HumanBytes(now.mean_bytes),
            prediction.uncertain_percent
        ),
        ..remedy.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::Sample;

    fn replay(bytes: u64) -> Replay {
        Replay { samples: vec![Sample { time_ns: 0, bytes }], ..Replay::default() }
    }

    #[test]
    fn a_replayed_remedy_has_the_bytes_that_its_replay_saved_and_never_fewer_than_none() {
        let assumed = Remedy {
            action: "fewer arenas".into(),
            predicted_bytes: Some(900),
            at_most: true,
            basis: "an assumption".into(),
            setting: Some("glibc:arena_max=2".into()),
        };
        let done = |then: u64| replayed(&assumed, &replay(1000), &replay(then), (false, 0.5));
        let better = done(700);
        assert_eq!((better.predicted_bytes, better.at_most, better.basis.contains("± 4 %")), (Some(300), false, true), "{better:?}");
        assert!(done(990).basis.contains("noise"));
        assert_eq!((done(1500).predicted_bytes, done(1500).basis.contains("would take more")), (Some(0), true));
        let crashed = Replay { stopped: Some("it crashed".into()), ..replay(10) };
        assert_eq!(replayed(&assumed, &replay(1000), &crashed, (false, 0.0)).predicted_bytes, None);
    }
}
