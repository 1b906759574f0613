//! The page of `fragprof whatif --html`: the table with its brackets, and the curves. One file that refers to nothing outside.

use std::fmt::Write as _;

use super::whatif::Report;
use crate::replay::Prediction;
use crate::replay::curves::{self, Curve, escaped};
use crate::replay::forecast::{Compared, pick};
use crate::units::{HumanBytes, ShortDuration, counted};

const STYLE: &str = "body{font-family:sans-serif;max-width:72em;margin:2em auto;padding:0 1em;color:#222}table{border-collapse:collapse;margin:1em 0}\
    td,th{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left}\
    small{color:#666}tr.pick td{font-weight:bold}tr.tie td:first-child::after{content:\" =\";color:#666}svg{width:100%;height:auto}";

/// The page. Texts of the trace are escaped; there is no script in it.
pub(super) fn page(title: &str, report: &Report, began_ns: u64, drawn: &[Curve]) -> String {
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title><style>{STYLE}</style></head><body>\n<h1>{0}</h1>\n",
        escaped(title)
    );
    let trace = &report.trace;
    let mut paragraph = |text: &str| {
        // Writing to a string does not fail.
        let _ = writeln!(out, "<p>{}</p>", escaped(text));
    };
    paragraph(&format!(
        "{}: {} of {} in {}",
        trace.comm,
        counted(trace.events, "event"),
        counted(trace.threads, "thread"),
        ShortDuration(trace.duration_ns as f64 / 1e9)
    ));
    report.notes.iter().for_each(|note| paragraph(note));
    if let Some(refused) = &report.refused {
        paragraph(refused);
    }
    if let (Some(best), None) = (pick(&report.predictions), &report.refused) {
        let set = if best.environment.is_empty() { String::new() } else { format!(" ({})", best.environment.join(" ")) };
        paragraph(&format!("Pick: {}{set}. Not tested on live traffic.", best.setting));
    }
    let enough = &report.enough;
    paragraph(&format!("Is the trace long enough? {}: {}.", if enough.is_enough { "Yes" } else { "No" }, enough.why));
    if report.refused.is_none() {
        predictions(&mut out, &report.predictions);
    }
    calibration(&mut out, report.calibration.rungs.iter().map(|one| ("", one)), report.calibration.over_time.iter());
    // The drawing is XML, which HTML embeds.
    out.push_str(&curves::svg("resident bytes of the heap", began_ns, drawn));
    out.push_str("</body></html>\n");
    out
}

fn predictions(out: &mut String, predictions: &[Prediction]) {
    out.push_str(
        "<table><tr><th>setting</th><th>peak</th><th>mean</th><th>end</th><th>mean against today</th><th>trimmable at the end</th>\
         <th>CPU in calls, a hint</th></tr>\n",
    );
    let today_ns = predictions.first().map_or(0, |one| one.call_ns);
    let ties = predictions.iter().filter(|one| one.is_best).count() > 1;
    let picked = pick(predictions).map(|one| &one.setting);
    for one in predictions {
        let class = match (picked == Some(&one.setting), one.is_best && ties) {
            (true, true) => "pick tie",
            (true, false) => "pick",
            (false, true) => "tie",
            (false, false) => "",
        };
        let name = escaped(&one.setting);
        if let Some(reason) = &one.failed {
            let _ = writeln!(out, "<tr><td>{name}</td><td colspan=\"6\">{}</td></tr>", escaped(reason));
            continue;
        }
        let bracketed = |bytes: u64| {
            let (low, high) = one.bracket(bytes);
            format!("{}<br><small>{} to {}</small>", HumanBytes(bytes), HumanBytes(low), HumanBytes(high))
        };
        let _ = writeln!(
            out,
            "<tr class=\"{class}\"><td>{name}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>",
            bracketed(one.figures.peak_bytes),
            bracketed(one.figures.mean_bytes),
            bracketed(one.figures.end_bytes),
            one.change_percent.map_or_else(|| "–".to_owned(), |percent| format!("{percent:+.0} %")),
            one.trimmable_at_end_bytes.map_or_else(|| "not known".to_owned(), |bytes| HumanBytes(bytes).to_string()),
            one.cpu_ratio(today_ns).map_or_else(|| "not known".to_owned(), |ratio| format!("× {ratio:.1}")),
        );
    }
    out.push_str("</table>\n<p><small>Small: where the truth is expected. = : cannot be told apart from the lowest mean.</small></p>\n");
}

fn calibration<'a>(
    out: &mut String,
    rungs: impl Iterator<Item = (&'static str, &'a Compared)>,
    over_time: impl Iterator<Item = &'a Compared>,
) {
    out.push_str("<h2>The replay under today's settings against the recorded process</h2>\n");
    out.push_str("<table><tr><th></th><th>recorded</th><th>replayed</th><th>error</th></tr>\n");
    for (of, one) in rungs.chain(over_time.map(|one| ("resident over time, ", one))) {
        let (recorded, replayed) = (HumanBytes(one.recorded_bytes), HumanBytes(one.replayed_bytes));
        let _ = writeln!(out, "<tr><td>{of}{}</td><td>{recorded}</td><td>{replayed}</td><td>{:+.1} %</td></tr>", one.what, one.percent);
    }
    out.push_str("</table>\n");
}

#[cfg(test)]
mod tests {
    use super::super::whatif::Traced;
    use super::*;
    use crate::replay::forecast::{Calibration, rank};
    use crate::replay::{Enough, Replay, Sample};

    #[test]
    fn the_page_has_every_setting_and_no_markup_from_the_trace() {
        let replay = |bytes| Replay { samples: vec![Sample { time_ns: 0, bytes }], ..Replay::default() };
        let of = |name: &str, bytes| Prediction::of(name.into(), vec!["A=<b>".into()], &replay(bytes), false, 0.0);
        let mut predictions = vec![of("today (glibc)", 100 << 20), of("jemalloc", 50 << 20), of("other", (50 << 20) + 1)];
        predictions.push(Prediction::failed("gone".into(), Vec::new(), "<script>".into()));
        rank(&mut predictions);
        let trace = Traced { comm: "<script>alert(1)</script>".into(), ..Traced::default() };
        let report = Report {
            trace,
            calibration: Calibration::default(),
            predictions,
            causes: Vec::new(),
            notes: vec!["a & b".into()],
            refused: None,
            enough: Enough::default(),
        };
        let page = page("app.fpt", &report, 0, &[]);
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;alert(1)") && page.contains("a &amp; b"), "{page}");
        assert!(page.contains("<tr class=\"pick tie\"><td>jemalloc</td><td>50.0 MiB<br><small>48.0 MiB to 52.0 MiB</small>"), "{page}");
        assert_eq!(page.matches("<tr").count(), 6);
        assert!(!page.contains("http-equiv") && !page.contains("src="), "nothing outside the file");
    }
}
