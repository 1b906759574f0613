//! From measured replays to predictions: figures over time, how far the replay under today's settings is from the recorded process, the
//! brackets that follow from it, and which setting is best. Pure.

use serde::Serialize;

use super::outcome::{Moment, Replay, Sample, interpolated};
use super::survey::Survey;
use crate::trace::Account;

/// Half-width of a bracket beside the calibration's error, in percent: what remains between predictions and reality for programs of one
/// thread and of several (docs/whatif.md).
const UNCERTAIN_PERCENT: f64 = 4.0;
/// See [`UNCERTAIN_PERCENT`]: there, the scheduling of threads is not the recorded one.
const UNCERTAIN_THREADS_PERCENT: f64 = 12.0;
/// Calibration that is wanted.
pub const CALIBRATED_PERCENT: f64 = 2.0;
/// Calibration from which on nothing is predicted.
pub const REFUSED_PERCENT: f64 = 25.0;
/// Predictions that differ by less are a tie.
pub const TIE_PERCENT: f64 = 2.0;
/// Settings of one allocator that are combined.
const COMBINED_MAX: usize = 3;
/// The end of a run, in thousandths of its duration: the last ones may be the teardown.
const END_FROM: u64 = 900;
/// See [`END_FROM`].
pub const END_TO: u64 = 970;
/// Censuses after this are not of the end.
const TEARDOWN_FROM: u64 = 980;

/// A curve's figures, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Figures {
    /// The highest sample.
    pub peak_bytes: u64,
    /// The mean over the whole time.
    pub mean_bytes: u64,
    /// The mean over the last tenth, without the very end, which may be the teardown.
    pub end_bytes: u64,
}

impl Figures {
    /// Figures of samples at even intervals.
    #[must_use]
    pub fn of(samples: &[Sample]) -> Self {
        let Some(last) = samples.last() else { return Self::default() };
        let at = |thousandths: u64| moment(samples, thousandths);
        let end: Vec<Sample> = samples.iter().filter(|one| (at(END_FROM)..=at(END_TO)).contains(&one.time_ns)).copied().collect();
        Self {
            peak_bytes: samples.iter().map(|one| one.bytes).max().unwrap_or(0),
            mean_bytes: mean(samples),
            end_bytes: if end.is_empty() { last.bytes } else { mean(&end) },
        }
    }
}

/// A time between the first and the last sample.
fn moment(samples: &[Sample], thousandths: u64) -> u64 {
    let (Some(first), Some(last)) = (samples.first(), samples.last()) else { return 0 };
    let span = last.time_ns.saturating_sub(first.time_ns);
    first.time_ns.saturating_add((u128::from(span) * u128::from(thousandths) / 1000) as u64)
}

/// The sum of two curves that were sampled at the same times.
#[must_use]
pub fn sum(one: &[Sample], other: &[Sample]) -> Vec<Sample> {
    one.iter().map(|at| Sample { time_ns: at.time_ns, bytes: at.bytes.saturating_add(interpolated(other, at.time_ns)) }).collect()
}

fn mean(samples: &[Sample]) -> u64 {
    let sum: u128 = samples.iter().map(|one| u128::from(one.bytes)).sum();
    u64::try_from(sum / samples.len().max(1) as u128).unwrap_or(u64::MAX)
}

/// A difference in percent of the second; `None` if there is nothing to compare with.
#[must_use]
pub fn percent(of: u64, than: u64) -> Option<f64> {
    (than > 0).then(|| (of as f64 / than as f64 - 1.0) * 100.0)
}

/// A figure of the recorded process and of its replay.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Compared {
    /// What it is.
    pub what: &'static str,
    /// Of the recorded process.
    pub recorded_bytes: u64,
    /// Of the replay under its settings.
    pub replayed_bytes: u64,
    /// Difference in percent of the recorded figure, or for parts of the heap in percent of its resident bytes.
    pub percent: f64,
}

/// How the replay under today's settings compares with the recorded process.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Calibration {
    /// Rungs of the heap, averaged over the censuses that both have, of those during which the process's memory hardly changed.
    pub rungs: Vec<Compared>,
    /// Censuses that were compared.
    pub censuses: usize,
    /// Peak, mean and end of the resident bytes.
    pub over_time: Vec<Compared>,
}

impl Calibration {
    /// Compares the trace's accounts and samples with a replay.
    #[must_use]
    pub fn of(survey: &Survey, replay: &Replay) -> Self {
        let mut calibration = Self::default();
        let pairs: Vec<(&Account, &Moment)> = survey
            .steady_accounts()
            .filter_map(|account| Some((account, replay.moments.iter().find(|moment| moment.time_ns == account.time_ns)?)))
            .filter(|(account, moment)| account.heap.resident_bytes.is_some() && moment.ladder.is_some())
            .collect();
        calibration.censuses = pairs.len();
        calibration.rungs = rungs(&pairs);
        calibration.over_time = over_time(survey, replay);
        calibration
    }

    /// The largest error of the resident bytes over time, or of the censuses if there is no curve, with its sign; `None` = there is nothing to
    /// compare with. A peak that is higher in the replay is none: the recording's samples miss short ones.
    #[must_use]
    pub fn error_percent(&self) -> Option<f64> {
        let errors = if self.over_time.is_empty() { &self.rungs } else { &self.over_time };
        let counts = |one: &&Compared| one.what != "peak" || one.percent < 0.0;
        errors.iter().filter(counts).map(|one| one.percent).max_by(|a, b| a.abs().total_cmp(&b.abs()))
    }

    /// The error of a rung by the censuses.
    #[must_use]
    pub fn rung_percent(&self, what: &str) -> Option<f64> {
        self.rungs.iter().find(|one| one.what == what).map(|one| one.percent)
    }

    /// The error of the mean resident bytes.
    #[must_use]
    pub fn mean_percent(&self) -> Option<f64> {
        self.over_time.iter().find(|one| one.what == "mean").map(|one| one.percent)
    }
}

/// A rung of a recorded account and of a replayed heap.
type Rung = fn(&Account, &Moment) -> Option<(u64, u64)>;

fn rungs(pairs: &[(&Account, &Moment)]) -> Vec<Compared> {
    const RUNGS: [(&str, Rung); 5] = [
        ("extent", |account, moment| Some((account.heap.extent_bytes?, moment.ladder?.extent_bytes))),
        ("resident", |account, moment| Some((account.heap.resident_bytes?, moment.ladder?.resident_bytes))),
        ("live", |account, moment| account.heap.live_bytes.zip(moment.ladder?.live_bytes)),
        ("trimmable", |account, moment| account.heap.trimmable_bytes.zip(moment.ladder?.trimmable_bytes)),
        ("pinned", |account, moment| account.heap.pinned_bytes.zip(moment.ladder?.pinned_bytes)),
    ];
    let sums = RUNGS.iter().filter_map(|(what, rung)| {
        let (mut recorded, mut replayed, mut resident, mut count) = (0u64, 0u64, 0u64, 0u32);
        for (account, moment) in pairs {
            let Some((here, there)) = rung(account, moment) else { continue };
            recorded = recorded.saturating_add(here);
            replayed = replayed.saturating_add(there);
            resident = resident.saturating_add(account.heap.resident_bytes.unwrap_or(0));
            count += 1;
        }
        let part = matches!(*what, "trimmable" | "pinned");
        let than = if part { resident } else { recorded };
        let percent = (than > 0).then(|| (replayed as f64 - recorded as f64) / than as f64 * 100.0)?;
        let each = |sum: u64| sum / u64::from(count.max(1));
        Some(Compared { what, recorded_bytes: each(recorded), replayed_bytes: each(replayed), percent })
    });
    sums.collect()
}

/// Resident bytes of the recorded heap over time: its anonymous memory without what its censuses leave; without any, without what it had
/// beside the replay's heap at its first sample.
#[must_use]
pub fn recorded_resident(survey: &Survey, replay: &Replay) -> Vec<Sample> {
    let all: Vec<Sample> = survey.usage.samples.iter().map(|&(time_ns, bytes)| Sample { time_ns, bytes }).collect();
    let Some(first) = all.first() else { return Vec::new() };
    let by_census = survey.steady_accounts().filter_map(|account| {
        let bytes = interpolated(&all, account.time_ns).saturating_sub(account.heap.resident_bytes?);
        Some(Sample { time_ns: account.time_ns, bytes })
    });
    let mut others: Vec<Sample> = by_census.collect();
    if others.is_empty() {
        let bytes = first.bytes.saturating_sub(interpolated(&replay.resident_by_census(), first.time_ns));
        others.push(Sample { time_ns: first.time_ns, bytes });
    }
    let heap = |one: &Sample| Sample { time_ns: one.time_ns, bytes: one.bytes.saturating_sub(interpolated(&others, one.time_ns)) };
    all.iter().map(heap).collect()
}

fn over_time(survey: &Survey, replay: &Replay) -> Vec<Compared> {
    let recorded = recorded_resident(survey, replay);
    let resident = replay.resident_by_census();
    if recorded.is_empty() || resident.is_empty() {
        return Vec::new();
    }
    // At the same times.
    let there: Vec<Sample> =
        recorded.iter().map(|one| Sample { time_ns: one.time_ns, bytes: interpolated(&resident, one.time_ns) }).collect();
    let (here, there) = (Figures::of(&recorded), Figures::of(&there));
    let pairs = [
        ("peak", here.peak_bytes, there.peak_bytes),
        ("mean", here.mean_bytes, there.mean_bytes),
        ("end", here.end_bytes, there.end_bytes),
    ];
    let compared = |(what, recorded_bytes, replayed_bytes)| {
        let percent = percent(replayed_bytes, recorded_bytes)?;
        Some(Compared { what, recorded_bytes, replayed_bytes, percent })
    };
    pairs.into_iter().filter_map(compared).collect()
}

/// A prediction, or why there is none.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// The setting.
    pub setting: String,
    /// What to put into the environment.
    pub environment: Vec<String>,
    /// Resident bytes of the heap.
    pub figures: Figures,
    /// Half-width of the bracket around each, in percent.
    pub uncertain_percent: f64,
    /// The part of it that is due to the heap from before the recording: how much the mean differs if that has no holes.
    pub before_percent: Option<f64>,
    /// The mean over the first half of the recording.
    pub half_mean_bytes: u64,
    /// The mean compared with the replay under today's settings, in percent.
    pub change_percent: Option<f64>,
    /// Resident whole free pages at the end; `None` if the allocator's data is not understood.
    pub trimmable_at_end_bytes: Option<u64>,
    /// Free bytes on pages with live ones at the end, likewise.
    pub pinned_at_end_bytes: Option<u64>,
    /// Time of an average call in nanoseconds: a hint.
    pub call_ns: u64,
    /// Calls that returned no block.
    pub failures: u64,
    /// Not distinguishable from the best.
    pub is_best: bool,
    /// Why there are no figures, or only up to some time.
    pub failed: Option<String>,
}

impl Prediction {
    /// The figures of a replay. `has_threads`: the trace has several, or it is not known. `calibration_percent`: how far the replay under
    /// today's settings was off.
    #[must_use]
    pub fn of(setting: String, environment: Vec<String>, replay: &Replay, has_threads: bool, calibration_percent: f64) -> Self {
        let uncertain = if has_threads { UNCERTAIN_THREADS_PERCENT } else { UNCERTAIN_PERCENT };
        let teardown_ns = moment(&replay.samples, TEARDOWN_FROM);
        let end = replay.moments.iter().rfind(|moment| moment.time_ns < teardown_ns).and_then(|moment| moment.ladder);
        let resident = replay.resident();
        let half_ns = moment(&resident, 500);
        let half = resident.iter().take_while(|one| one.time_ns <= half_ns).copied().collect::<Vec<_>>();
        Self {
            setting,
            environment,
            figures: Figures::of(&resident),
            uncertain_percent: uncertain + calibration_percent.abs(),
            before_percent: None,
            half_mean_bytes: mean(&half),
            change_percent: None,
            trimmable_at_end_bytes: end.and_then(|ladder| ladder.trimmable_bytes),
            pinned_at_end_bytes: end.and_then(|ladder| ladder.pinned_bytes),
            call_ns: replay.counts.call_ns,
            failures: replay.counts.failures,
            is_best: false,
            failed: replay.stopped.clone(),
        }
    }

    /// A setting that was not replayed.
    #[must_use]
    pub fn failed(setting: String, environment: Vec<String>, reason: String) -> Self {
        let nothing = Self::of(setting, environment, &Replay::default(), false, 0.0);
        Self { failed: Some(reason), ..nothing }
    }

    /// Widens the bracket by the difference to a replay whose heap began without holes.
    pub fn widen(&mut self, dense: Figures) {
        self.before_percent = percent(dense.mean_bytes, self.figures.mean_bytes);
        self.uncertain_percent += self.before_percent.unwrap_or(0.0).abs();
    }

    /// Time of a call against the one of today's settings; `None` if either was not measured.
    #[must_use]
    pub fn cpu_ratio(&self, today_ns: u64) -> Option<f64> {
        let is_known = self.failed.is_none() && today_ns > 0 && self.call_ns > 0;
        is_known.then(|| self.call_ns as f64 / today_ns as f64)
    }

    /// The bracket around a figure.
    #[must_use]
    pub fn bracket(&self, bytes: u64) -> (u64, u64) {
        let half = (bytes as f64 * self.uncertain_percent / 100.0) as u64;
        (bytes.saturating_sub(half), bytes.saturating_add(half))
    }
}

/// Compares all with the first, which is under today's settings, and marks the best by their mean; today's is among them if nothing is
/// better by more than a tie.
pub fn rank(predictions: &mut [Prediction]) {
    let today = predictions.first().filter(|one| one.failed.is_none()).map(|one| one.figures.mean_bytes);
    let best = predictions.iter().filter(|one| one.failed.is_none()).map(|one| one.figures.mean_bytes).min();
    for one in predictions.iter_mut().filter(|one| one.failed.is_none()) {
        let mean = one.figures.mean_bytes;
        one.change_percent = today.and_then(|today| percent(mean, today));
        one.is_best = best.is_some_and(|best| mean as f64 <= best as f64 * (1.0 + TIE_PERCENT / 100.0));
    }
}

/// The best prediction: today's if nothing is better by more than a tie. `None` before they are ranked.
#[must_use]
pub fn pick(predictions: &[Prediction]) -> Option<&Prediction> {
    let today = predictions.first().filter(|one| one.is_best);
    today.or_else(|| predictions.iter().filter(|one| one.is_best).min_by_key(|one| one.figures.mean_bytes))
}

/// Settings that combine the best of those that were tried: of each allocator the three best single ones that are better than its defaults by
/// more than a tie, by twos and all together. As [`super::Setting::parse`] reads them.
#[must_use]
pub fn combinations(predictions: &[Prediction]) -> Vec<String> {
    let usable = || predictions.iter().filter(|one| one.failed.is_none());
    let mut singles: Vec<(&str, &str, u64)> = usable()
        .filter_map(|one| Some((one.setting.split_once(':')?, one.figures.mean_bytes)))
        .filter(|((name, settings), mean_bytes)| {
            let today = format!("today ({name})");
            let defaults = usable().filter(|one| one.setting == *name || one.setting == today).map(|one| one.figures.mean_bytes).min();
            !settings.is_empty()
                && !settings.contains('/')
                && defaults.is_some_and(|defaults| (*mean_bytes as f64) < defaults as f64 * (1.0 - TIE_PERCENT / 100.0))
        })
        .map(|((name, settings), mean_bytes)| (name, settings, mean_bytes))
        .collect();
    singles.sort_by_key(|&(name, _, mean_bytes)| (name, mean_bytes));
    let keys = |settings: &str| settings.split(',').filter_map(|one| one.split('=').next()).map(str::to_owned).collect::<Vec<_>>();
    let mut all = Vec::new();
    for of_one in singles.chunk_by(|a, b| a.0 == b.0) {
        let best: Vec<&str> = of_one.iter().take(COMBINED_MAX).map(|one| one.1).collect();
        for chosen in (1usize..1 << best.len()).filter(|chosen| chosen.count_ones() > 1) {
            let parts: Vec<&str> = best.iter().enumerate().filter(|(nth, _)| chosen >> nth & 1 == 1).map(|(_, part)| *part).collect();
            let names: Vec<String> = parts.iter().flat_map(|part| keys(part)).collect();
            let differ = names.iter().enumerate().all(|(nth, name)| !names[..nth].contains(name));
            if let (Some((name, ..)), true) = (of_one.first(), differ) {
                all.push(format!("{name}:{}", parts.join(",")));
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::heap::ladder::Ladder;
    use crate::trace::Usage;

    fn even(bytes: &[u64]) -> Vec<Sample> {
        bytes.iter().enumerate().map(|(index, &bytes)| Sample { time_ns: index as u64 * 10, bytes }).collect()
    }

    #[test]
    fn the_end_is_the_last_tenth_without_the_teardown() {
        let mut bytes = vec![100; 90];
        bytes.extend([200; 8]);
        bytes.extend([0; 3]);
        let figures = Figures::of(&even(&bytes));
        assert_eq!((figures.peak_bytes, figures.end_bytes), (200, 200));
        assert_eq!(figures.mean_bytes, (90 * 100 + 8 * 200) / 101);
        assert_eq!(Figures::of(&[]), Figures::default());
        assert_eq!(Figures::of(&even(&[7])).end_bytes, 7);
    }

    #[test]
    fn calibration_compares_the_same_moments_and_the_heap_without_the_rest_of_the_process() {
        let ladder = |resident_bytes| Ladder { extent_bytes: 300, resident_bytes, live_bytes: Some(100), ..Ladder::default() };
        let account = Account { time_ns: 10, took_ns: 0, heap: ladder(200).map(Some), large: Vec::new() };
        // 50 bytes of the recorded process are not its heap's.
        let usage = Usage { samples: vec![(0, 250), (10, 250), (20, 250)] };
        let survey = Survey { accounts: vec![account, Account { time_ns: 99, ..Account::default() }], usage, ..Survey::default() };
        let moments = vec![Moment { time_ns: 10, ladder: Some(ladder(210)), anonymous_bytes: 215 }];
        let replay = Replay { samples: even(&[215, 215, 215]), moments, ..Replay::default() };
        let calibration = Calibration::of(&survey, &replay);
        assert_eq!(calibration.censuses, 1);
        let error = |list: &[Compared], what: &str| list.iter().find(|one| one.what == what).map(|one| one.percent.round());
        assert_eq!(error(&calibration.rungs, "resident"), Some(5.0));
        assert_eq!((error(&calibration.rungs, "live"), error(&calibration.rungs, "pinned")), (Some(0.0), None));
        assert_eq!((error(&calibration.over_time, "mean"), calibration.error_percent().map(f64::round)), (Some(5.0), Some(5.0)));
    }

    fn predicted(setting: &str, mean_bytes: u64, half_mean_bytes: u64) -> Prediction {
        let replay = Replay { samples: even(&[mean_bytes]), ..Replay::default() };
        Prediction { half_mean_bytes, ..Prediction::of(setting.into(), Vec::new(), &replay, false, 0.0) }
    }

    #[test]
    fn the_best_settings_of_an_allocator_are_combined_if_they_set_different_things() {
        let tried = [
            ("today (glibc)", 1000),
            ("glibc:arena_max=1", 800),
            ("glibc:arena_max=2", 850),
            ("glibc:tcache_count=0", 900),
            ("glibc:mmap_threshold=131072", 950),
            ("glibc:hugetlb=1", 990),
            ("jemalloc", 700),
            ("jemalloc:narenas=1", 600),
        ];
        let all: Vec<Prediction> = tried.iter().map(|&(setting, mean)| predicted(setting, mean, mean)).collect();
        // Two numbers of arenas exclude each other, and one setting of jemalloc has nothing to be combined with.
        assert_eq!(combinations(&all), ["glibc:arena_max=1,tcache_count=0", "glibc:arena_max=2,tcache_count=0"]);
        assert!(combinations(&all[..2]).is_empty());
    }

    #[test]
    fn settings_within_a_tie_of_the_best_are_all_best_and_failed_ones_never() {
        let of = |mean: u64| {
            let replay = Replay { samples: even(&[mean]), ..Replay::default() };
            Prediction::of(String::new(), Vec::new(), &replay, false, 0.0)
        };
        let mut all = vec![of(1000), of(985), of(1040), Prediction::failed(String::new(), Vec::new(), "it crashed".into())];
        rank(&mut all);
        assert_eq!(all.iter().map(|one| one.is_best).collect::<Vec<_>>(), [true, true, false, false]);
        assert_eq!(pick(&all).map(|one| one.figures.mean_bytes), Some(1000));
        assert_eq!(pick(&all[1..]).map(|one| one.figures.mean_bytes), Some(985));
        assert_eq!(all[1].change_percent.map(f64::round), Some(-2.0));
        assert_eq!(all[0].bracket(1000), (960, 1040));
    }
}
