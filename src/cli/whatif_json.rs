//! What `fragprof whatif --json` prints. Keys are in snake_case with the unit last, ratios are fractions. Stable keys: `calibration` with
//! `resident_error_ratio`, `trimmable_error_ratio`, `pinned_error_ratio`, `usable`; `settings` with `name`, `environment`, `peak_bytes`,
//! `mean_bytes`, `end_bytes`, `mean_bytes_low`, `mean_bytes_high`, `cpu_ratio`, `tie`, today's first; `pick`; `enough` with `is_enough`, `why`.

use serde::Serialize;

use super::whatif::{Report, Traced};
use crate::replay::causes::Cause;
use crate::replay::forecast::{Compared, pick};
use crate::replay::{Enough, Prediction};

#[derive(Serialize)]
struct Page<'a> {
    trace: &'a Traced,
    calibration: Calibration<'a>,
    settings: Vec<Row<'a>>,
    /// Name of the setting that is picked: today's if nothing is better by more than a tie; `null` if nothing is predicted.
    pick: Option<&'a str>,
    enough: &'a Enough,
    causes: &'a [Cause],
    notes: &'a [String],
    /// Why nothing is predicted.
    refused: Option<&'a str>,
}

#[derive(Serialize)]
struct Calibration<'a> {
    /// The largest error of peak, mean and end of the resident bytes; `null` if there is nothing to compare with.
    resident_error_ratio: Option<f64>,
    /// As a share of the resident bytes, like the next one.
    trimmable_error_ratio: Option<f64>,
    pinned_error_ratio: Option<f64>,
    /// Whether predictions are made.
    usable: bool,
    censuses: usize,
    rungs: Vec<Pair<'a>>,
    over_time: Vec<Pair<'a>>,
}

/// A figure of the recorded process and of its replay.
#[derive(Serialize)]
struct Pair<'a> {
    what: &'a str,
    recorded_bytes: u64,
    replayed_bytes: u64,
    error_ratio: f64,
}

#[derive(Serialize)]
struct Row<'a> {
    name: &'a str,
    /// Lines `NAME=value`.
    environment: &'a [String],
    peak_bytes: Option<u64>,
    mean_bytes: Option<u64>,
    end_bytes: Option<u64>,
    peak_bytes_low: Option<u64>,
    peak_bytes_high: Option<u64>,
    mean_bytes_low: Option<u64>,
    mean_bytes_high: Option<u64>,
    end_bytes_low: Option<u64>,
    end_bytes_high: Option<u64>,
    /// Half-width of the brackets.
    uncertain_ratio: Option<f64>,
    /// The part of it that is due to the heap from before the recording.
    before_ratio: Option<f64>,
    /// Mean against the replay under today's settings: 0.9 = a tenth less.
    mean_ratio: Option<f64>,
    trimmable_at_end_bytes: Option<u64>,
    pinned_at_end_bytes: Option<u64>,
    /// Time of the allocator's calls against today's: a hint. `null` if it was not measured.
    cpu_ratio: Option<f64>,
    call_ns: u64,
    failed_calls: u64,
    /// Whether it cannot be told apart from the best, and is not the only one.
    tie: bool,
    /// Why there are no figures.
    failed: Option<&'a str>,
}

/// The object.
///
/// # Errors
/// None that plain numbers and texts could cause.
pub(super) fn to_string(report: &Report) -> serde_json::Result<String> {
    let Report { trace, calibration, predictions, causes, notes, refused, enough } = report;
    let today_ns = predictions.first().map_or(0, |one| one.call_ns);
    let ties = predictions.iter().filter(|one| one.is_best).count() > 1;
    let page = Page {
        trace,
        calibration: Calibration {
            resident_error_ratio: calibration.error_percent().map(ratio),
            trimmable_error_ratio: calibration.rung_percent("trimmable").map(ratio),
            pinned_error_ratio: calibration.rung_percent("pinned").map(ratio),
            usable: refused.is_none(),
            censuses: calibration.censuses,
            rungs: calibration.rungs.iter().map(pair).collect(),
            over_time: calibration.over_time.iter().map(pair).collect(),
        },
        settings: predictions.iter().map(|one| row(one, today_ns, ties)).collect(),
        pick: pick(predictions).map(|one| one.setting.as_str()),
        enough,
        causes,
        notes,
        refused: refused.as_deref(),
    };
    serde_json::to_string_pretty(&page)
}

fn ratio(percent: f64) -> f64 {
    percent / 100.0
}

fn pair(one: &Compared) -> Pair<'_> {
    let Compared { what, recorded_bytes, replayed_bytes, percent } = one;
    Pair { what, recorded_bytes: *recorded_bytes, replayed_bytes: *replayed_bytes, error_ratio: ratio(*percent) }
}

fn row(one: &Prediction, today_ns: u64, ties: bool) -> Row<'_> {
    let known = one.failed.is_none();
    let figure = |bytes: u64| known.then_some(bytes);
    let low = |bytes: u64| known.then(|| one.bracket(bytes).0);
    let high = |bytes: u64| known.then(|| one.bracket(bytes).1);
    let figures = one.figures;
    Row {
        name: &one.setting,
        environment: &one.environment,
        peak_bytes: figure(figures.peak_bytes),
        mean_bytes: figure(figures.mean_bytes),
        end_bytes: figure(figures.end_bytes),
        peak_bytes_low: low(figures.peak_bytes),
        peak_bytes_high: high(figures.peak_bytes),
        mean_bytes_low: low(figures.mean_bytes),
        mean_bytes_high: high(figures.mean_bytes),
        end_bytes_low: low(figures.end_bytes),
        end_bytes_high: high(figures.end_bytes),
        uncertain_ratio: known.then(|| ratio(one.uncertain_percent)),
        before_ratio: one.before_percent.map(ratio),
        mean_ratio: one.change_percent.map(|percent| 1.0 + ratio(percent)),
        trimmable_at_end_bytes: one.trimmable_at_end_bytes.filter(|_| known),
        pinned_at_end_bytes: one.pinned_at_end_bytes.filter(|_| known),
        cpu_ratio: one.cpu_ratio(today_ns),
        call_ns: one.call_ns,
        failed_calls: one.failures,
        tie: one.is_best && ties,
        failed: one.failed.as_deref(),
    }
}
