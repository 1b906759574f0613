//! What `fragprof whatif` prints and writes: the report as text, and the patch of a Deployment.

use std::io::{self, Write};

use serde_json::json;

use super::whatif::{Report, WhatifArgs};
use crate::replay::Prediction;
use crate::replay::causes::{Cause, Saved};
use crate::replay::forecast::{CALIBRATED_PERCENT, pick};
use crate::sanitize::terminal;
use crate::units::{HumanBytes, ShortDuration, counted};

/// The whole report.
pub(super) fn write_report(out: &mut dyn Write, args: &WhatifArgs, report: &Report) -> io::Result<()> {
    let Report { trace, calibration, predictions, .. } = report;
    writeln!(
        out,
        "{}: {}, {} of {} in {}",
        terminal(&args.trace.display().to_string()),
        terminal(&trace.comm),
        counted(trace.events, "event"),
        counted(trace.threads, "thread"),
        ShortDuration(trace.duration_ns as f64 / 1e9)
    )?;
    for note in &report.notes {
        writeln!(out, "note: {}", terminal(note))?;
    }
    writeln!(out, "\nThe replay under today's settings, compared with the recorded process:")?;
    let all = calibration.rungs.iter().map(|one| ("", one)).chain(calibration.over_time.iter().map(|one| ("resident over time, ", one)));
    for (of, one) in all {
        let (recorded, replayed) = (HumanBytes(one.recorded_bytes), HumanBytes(one.replayed_bytes));
        let what = format!("{of}{}", one.what);
        writeln!(out, "  {what:<24} {:>10} recorded {:>10} replayed {:>+7.1} %", recorded.to_string(), replayed.to_string(), one.percent)?;
    }
    if calibration.rungs.is_empty() && calibration.over_time.is_empty() {
        writeln!(out, "  nothing to compare with")?;
    }
    if let Some(percent) = calibration.error_percent().map(f64::abs).filter(|percent| *percent > CALIBRATED_PERCENT) {
        writeln!(out, "  More than {CALIBRATED_PERCENT} % apart: all brackets are wider by {percent:.1} %.")?;
    }
    if let Some(refused) = &report.refused {
        return writeln!(out, "\n{}", terminal(refused));
    }
    write_table(out, predictions)?;
    write_best(out, report)?;
    writeln!(out, "Is the trace long enough? {}: {}.", if report.enough.is_enough { "Yes" } else { "No" }, terminal(&report.enough.why))?;
    write_causes(out, &report.causes)
}

fn write_causes(out: &mut dyn Write, causes: &[Cause]) -> io::Result<()> {
    if causes.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\nUnder today's settings, resident bytes saved on average and at the end, beside the pinned bytes charged to the stack:"
    )?;
    writeln!(out, "  {:>10}  {:>10} {:>10}  {:>10} {:>10}", "pinned", "not made:", "end", "apart:", "end")?;
    for cause in causes {
        let signed = |bytes: i64| format!("{}{}", if bytes < 0 { "-" } else { "" }, HumanBytes(bytes.unsigned_abs()));
        let pair = |saved: Option<Saved>| {
            saved.map_or_else(|| ("–".to_owned(), "–".to_owned()), |saved| (signed(saved.mean_bytes), signed(saved.end_bytes)))
        };
        let (without, pool) = (pair(cause.without), pair(cause.pool));
        let pinned = cause.pinned_bytes.map_or_else(|| "?".to_owned(), |bytes| HumanBytes(bytes).to_string());
        let (a, b, c, d) = (without.0, without.1, pool.0, pool.1);
        writeln!(out, "  {pinned:>10}  {a:>10} {b:>10}  {c:>10} {d:>10}  {}", terminal(&cause.stack))?;
    }
    Ok(())
}

/// All figures are in one unit, so that a column can be compared at a glance.
fn write_table(out: &mut dyn Write, predictions: &[Prediction]) -> io::Result<()> {
    let width = predictions.iter().map(|one| one.setting.chars().count()).max().unwrap_or(0).max(8);
    let highest = predictions.iter().map(|one| one.bracket(one.figures.peak_bytes).1).max().unwrap_or(0);
    let (unit, unit_bytes) = if highest < 10 << 20 { ("KiB", 1024.0) } else { ("MiB", 1024.0 * 1024.0) };
    let plain = |bytes: u64| format!("{:.1}", bytes as f64 / unit_bytes);
    writeln!(
        out,
        "\n  {:<width$} {:>24} {:>24} {:>24} {:>7} {:>9} {:>6}",
        format!("in {unit}"),
        "resident: peak",
        "mean",
        "end",
        "mean",
        "trimmable",
        "CPU"
    )?;
    let (today_ns, ties) = (predictions.first().map_or(0, |one| one.call_ns), predictions.iter().filter(|one| one.is_best).count() > 1);
    for one in predictions {
        let mark = match one.is_best {
            true if ties => '=',
            true => '*',
            false => ' ',
        };
        if let Some(reason) = &one.failed {
            writeln!(out, "{mark} {:<width$} {}", terminal(&one.setting), terminal(reason))?;
            continue;
        }
        let bracketed = |bytes: u64| {
            let (low, high) = one.bracket(bytes);
            format!("{} ({}–{})", plain(bytes), plain(low), plain(high))
        };
        let figures = one.figures;
        writeln!(
            out,
            "{mark} {:<width$} {:>24} {:>24} {:>24} {:>5} % {:>9} {:>6}{}",
            terminal(&one.setting),
            bracketed(figures.peak_bytes),
            bracketed(figures.mean_bytes),
            bracketed(figures.end_bytes),
            one.change_percent.map_or_else(|| "–".to_owned(), |percent| format!("{percent:+.0}")),
            one.trimmable_at_end_bytes.map_or_else(|| "?".to_owned(), plain),
            one.cpu_ratio(today_ns).map_or_else(|| "?".to_owned(), |ratio| format!("× {ratio:.1}")),
            if one.failures > 0 { format!("  {} failed", counted(one.failures, "call")) } else { String::new() },
        )?;
    }
    let mark = if ties { "= a tie: these cannot be told apart from the lowest mean" } else { "* the lowest mean" };
    writeln!(
        out,
        "{mark}; in brackets where the truth is expected; trimmable: whole free pages at the end; CPU: time in the allocator's calls against \
         today's, a hint from the replay"
    )
}

/// A strategic merge patch: lists of containers and of variables are merged by name. JSON with comments, which is YAML.
pub(super) fn patch(container: &str, best: &Prediction) -> anyhow::Result<String> {
    let variables = best.environment.iter().filter_map(|line| line.split_once('='));
    let env: Vec<_> = variables.map(|(name, value)| json!({ "name": name, "value": value })).collect();
    let patch = json!({ "spec": { "template": { "spec": { "containers": [{ "name": container, "env": env }] } } } });
    let figures = best.figures;
    Ok(format!(
        "# {}: {} resident on average by a replay, not tested on live traffic.\n# kubectl patch deployment NAME --patch-file FILE; the library \
         of LD_PRELOAD must be in the image.\n{}",
        terminal(&best.setting),
        HumanBytes(figures.mean_bytes),
        serde_json::to_string_pretty(&patch)? + "\n"
    ))
}

fn write_best(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    let Some(today) = report.predictions.first() else { return Ok(()) };
    if today.is_best {
        return writeln!(out, "\nNone of these settings is better than today's by more than the replay's noise.");
    }
    let Some(best) = pick(&report.predictions) else { return Ok(()) };
    let (low, high) = best.bracket(best.figures.mean_bytes);
    let calibration = report.calibration.mean_percent().map_or_else(|| "not known".to_owned(), |percent| format!("{percent:+.1} %"));
    writeln!(
        out,
        "\nReplaying this recording under {}: {} to {} on average against {} now; calibration {calibration}; not tested on live traffic.",
        terminal(&best.setting),
        HumanBytes(low),
        HumanBytes(high),
        HumanBytes(today.figures.mean_bytes)
    )?;
    if !best.environment.is_empty() {
        writeln!(out, "Set in the environment of the program:")?;
        for line in &best.environment {
            writeln!(out, "  {}", terminal(line))?;
        }
    }
    Ok(())
}
