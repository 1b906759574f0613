//! Predictions against programs really run under each setting, as a table (`make bench-whatif` writes it into docs/whatif.md).

use std::fmt::Write as _;
use std::path::Path;

use super::truth::Measured;
use super::{Recorded, figure, of, report};
use crate::support::bpf;

/// Runs of each program under each setting.
const RUNS: usize = 3;
const BEGIN: &str = "<!-- figures: make bench-whatif -->\n";
const END: &str = "<!-- end of figures -->\n";

type Environment = &'static [(&'static str, &'static str)];

const SETTINGS: [(&str, Environment); 9] = [
    ("glibc", &[]),
    ("glibc:arena_max=1", &[("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")]),
    ("glibc:tcache_count=0", &[("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")]),
    ("glibc:mmap_threshold=131072", &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")]),
    ("jemalloc", &[("LD_PRELOAD", "libjemalloc.so.2")]),
    (
        "jemalloc:dirty_decay_ms=0,muzzy_decay_ms=0",
        &[("LD_PRELOAD", "libjemalloc.so.2"), ("MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")],
    ),
    ("jemalloc:narenas=1", &[("LD_PRELOAD", "libjemalloc.so.2"), ("MALLOC_CONF", "narenas:1")]),
    ("tcmalloc", &[("LD_PRELOAD", "libtcmalloc_minimal.so.4")]),
    ("mimalloc", &[("LD_PRELOAD", "libmimalloc.so.2.0")]),
];

/// The median and half of the range of repeated measurements.
fn median(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let middle = values[values.len() / 2];
    (middle, (values[values.len() - 1] - values[0]) / 2.0)
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

#[test]
#[ignore = "runs each program thirty times: make bench-whatif"]
fn figures_of_predictions() {
    if bpf().is_none() {
        return;
    }
    let mut text = String::from(
        "| program | setting | peak, MiB | predicted | noise | end, MiB | predicted | noise |\n|---|---|---|---|---|---|---|---|\n",
    );
    let (mut errors, mut outside, mut cells) = (Vec::new(), 0, 0);
    let (mut calibrations, mut rates, mut bytes, mut picks) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for recorded in Recorded::all() {
        if !recorded.is_installed() {
            println!("{} is not installed", recorded.name);
            continue;
        }
        let directory = tempfile::tempdir().unwrap();
        let trace = recorded.record(&directory);
        let under: Vec<&str> = SETTINGS.iter().filter(|one| one.0 != "glibc").flat_map(|one| ["--under", one.0]).collect();
        let predicted = report(&trace, &under);
        calibrations.push((recorded.name, predicted["calibration_percent"].as_f64().unwrap_or(f64::NAN)));
        rates.push(figure(&predicted["trace"], "replay_events_per_second"));
        bytes.push(figure(&predicted["trace"], "bytes") / figure(&predicted["trace"], "events"));
        let mut means = Vec::new();
        for (setting, environment) in SETTINGS {
            let row = if setting == "glibc" { &predicted["predictions"][0] } else { of(&predicted, setting) };
            if let Some(reason) = row["failed"].as_str() {
                println!("{}: {setting}: {reason}", recorded.name);
                continue;
            }
            let runs: Vec<Measured> = (0..RUNS).map(|_| Measured::of(recorded.command().envs(environment.iter().copied()))).collect();
            let mut line = format!("| {} | {} |", recorded.name, setting.replace(",muzzy_decay_ms=0", ""));
            for (name, truth) in [
                ("peak_bytes", runs.iter().map(|run| run.peak_bytes as f64).collect::<Vec<_>>()),
                ("end_bytes", runs.iter().map(|run| run.end_bytes as f64).collect()),
            ] {
                let (truth, noise) = median(truth);
                let error = (figure(row, name) / truth - 1.0) * 100.0;
                cells += 1;
                outside += u32::from(error.abs() > figure(row, "uncertain_percent") + noise / truth * 100.0);
                errors.push(error.abs());
                let _ = write!(line, " {:.1} | {error:+.1} % | {:.1} % |", truth / f64::from(1 << 20), noise / truth * 100.0);
            }
            means.push((figure(row, "mean_bytes"), median(runs.iter().map(|run| run.mean_bytes as f64).collect()).0));
            println!("{line}");
            let _ = writeln!(text, "{line}");
        }
        let pick = means.iter().min_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1;
        let best = means.iter().map(|one| one.1).fold(f64::INFINITY, f64::min);
        picks.push((pick / best - 1.0) * 100.0);
    }
    errors.sort_by(f64::total_cmp);
    let near = calibrations.iter().filter(|one| one.1 <= 2.0).count();
    let good = picks.iter().filter(|one| **one <= 3.0).count();
    let list: Vec<String> = calibrations.iter().map(|(name, percent)| format!("{name} {percent:.1} %")).collect();
    let summary = format!(
        "Errors of {cells} figures of {} programs under {} settings: median {:.1} %, nine in ten below {:.1} %, largest {:.1} %; {outside} \
         outside their bracket. The pick by the predicted mean takes at most {:.1} % more than the best really run, within 3 % in {good} of \
         {}. Calibration: {}; within 2 % in {near}. {:.1} to {:.1} bytes an event; {:.1} to {:.1} million events a second, with the start \
         and the censuses.\n",
        calibrations.len(),
        SETTINGS.len(),
        quantile(&errors, 0.5),
        quantile(&errors, 0.9),
        quantile(&errors, 1.0),
        picks.iter().copied().fold(0.0, f64::max),
        picks.len(),
        list.join(", "),
        bytes.iter().copied().fold(f64::INFINITY, f64::min),
        bytes.iter().copied().fold(0.0, f64::max),
        rates.iter().copied().fold(f64::INFINITY, f64::min) / 1e6,
        rates.iter().copied().fold(0.0, f64::max) / 1e6,
    );
    println!("{summary}");
    if std::env::var_os("FRAGPROF_BLESS").is_some() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/whatif.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(BEGIN).expect("docs/whatif.md has a place for the figures");
        let (_, after) = rest.split_once(END).expect("docs/whatif.md has a place for the figures");
        std::fs::write(path, format!("{before}{BEGIN}{summary}\n{text}{END}{after}")).unwrap();
    }
}
