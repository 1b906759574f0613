//! Predictions against programs really run under each setting, as a table (`make bench-whatif` writes it into docs/whatif.md).

use std::fmt::Write as _;
use std::io::Read as _;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use super::truth::{Measured, mapped_by_itself};
use super::{Recorded, figure, fragprof, of, report};
use crate::support::bpf;

/// Runs of each program under each setting.
const RUNS: usize = 2;
/// The programs of a run, by name and separated by commas; all without it.
const PROGRAMS: &str = "PROGRAMS";
/// Memory of the program's own from which on it is told: a mebibyte.
const OWN_BYTES: f64 = (1 << 20) as f64;
const BEGIN: &str = "<!-- figures: make bench-whatif -->\n";
const END: &str = "<!-- end of figures -->\n";

type Environment = &'static [(&'static str, &'static str)];

const SETTINGS: [(&str, Environment); 12] = [
    ("glibc", &[]),
    ("glibc:arena_max=1", &[("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")]),
    ("glibc:arena_max=2", &[("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")]),
    ("glibc:tcache_count=0", &[("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")]),
    ("glibc:mmap_threshold=131072", &[("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")]),
    ("glibc:hugetlb=1", &[("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")]),
    ("jemalloc", &[("LD_PRELOAD", "libjemalloc.so.2")]),
    (
        "jemalloc:dirty_decay_ms=0,muzzy_decay_ms=0",
        &[("LD_PRELOAD", "libjemalloc.so.2"), ("MALLOC_CONF", "dirty_decay_ms:0,muzzy_decay_ms:0")],
    ),
    ("jemalloc:narenas=1", &[("LD_PRELOAD", "libjemalloc.so.2"), ("MALLOC_CONF", "narenas:1")]),
    ("tcmalloc", &[("LD_PRELOAD", "libtcmalloc_minimal.so.4")]),
    ("tcmalloc:release_rate=10", &[("LD_PRELOAD", "libtcmalloc_minimal.so.4"), ("TCMALLOC_RELEASE_RATE", "10")]),
    ("mimalloc", &[("LD_PRELOAD", "libmimalloc.so.2.0")]),
];

/// The middle of repeated measurements and half of their range.
fn middle(values: Vec<f64>) -> (f64, f64) {
    let (low, high) = values.iter().fold((f64::INFINITY, 0.0f64), |(low, high), &value| (low.min(value), high.max(value)));
    (low.midpoint(high), (high - low) / 2.0)
}

fn quantile(sorted: &[f64], share: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * share).round() as usize]
}

/// Replays a trace under all settings, and returns the report and the most memory that the command had beside the replayed heap, in bytes.
fn predicted(trace: &Path) -> (Value, f64) {
    let under = SETTINGS.iter().filter(|one| one.0 != "glibc").flat_map(|one| ["--under", one.0]);
    let mut command = fragprof();
    command.arg("whatif").arg(trace).arg("--json").args(under).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut output = child.stdout.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        output.read_to_string(&mut text).map(|_| text)
    });
    let mut most = 0u64;
    while child.try_wait().unwrap().is_none() {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let of = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.trim().trim_end_matches(" kB").parse::<u64>().ok()
        };
        most = most.max(of("RssAnon:").unwrap_or(0) + of("RssShmem:").unwrap_or(0));
        std::thread::sleep(Duration::from_millis(10));
    }
    let text = reader.join().unwrap().unwrap();
    (serde_json::from_str(&text).unwrap(), most as f64 * 1024.0)
}

/// How far two replays of a trace under the same settings are apart, at most, in percent.
fn difference(one: &Value, other: &Value) -> f64 {
    let apart = |name: &str| (figure(&one["settings"][0], name) / figure(&other["settings"][0], name) - 1.0).abs() * 100.0;
    ["peak_bytes", "mean_bytes", "end_bytes"].map(apart).into_iter().fold(0.0, f64::max)
}

/// The predictions of all programs, compared with the truth.
#[derive(Default)]
struct Figures {
    table: String,
    errors: Vec<f64>,
    within_noise: usize,
    outside: usize,
    calibrations: Vec<(&'static str, f64)>,
    /// By how much the pick takes more than the best, in percent.
    picks: Vec<f64>,
    rates: Vec<f64>,
    bytes: Vec<f64>,
    beside: Vec<f64>,
    differences: Vec<f64>,
    /// Memory that programs map themselves.
    own: Vec<String>,
}

impl Figures {
    fn add(&mut self, recorded: &Recorded) {
        let directory = tempfile::tempdir().unwrap();
        let trace = recorded.record(&directory);
        let (predicted, beside) = predicted(&trace);
        self.differences.push(difference(&predicted, &report(&trace, &["--under", "glibc"])));
        self.beside.push(beside);
        self.calibrations.push((recorded.name, figure(&predicted["calibration"], "resident_error_ratio").abs() * 100.0));
        self.rates.push(figure(&predicted["trace"], "replay_events_per_second"));
        self.bytes.push(figure(&predicted["trace"], "bytes") / figure(&predicted["trace"], "events"));
        if predicted["settings"].as_array().unwrap().len() < SETTINGS.len() {
            // A replay that is not like the recorded process.
            println!("{}: nothing is predicted: {}", recorded.name, predicted["notes"]);
            self.picks.push(f64::INFINITY);
            return;
        }
        let own = mapped_by_itself(&mut recorded.command()) as f64;
        let own = if own < OWN_BYTES { 0.0 } else { own };
        if own > 0.0 {
            self.own.push(format!("{} {:.1} MiB", recorded.name, own / f64::from(1 << 20)));
        }
        let mut means: Vec<(&str, f64)> = Vec::new();
        for (setting, environment) in SETTINGS {
            let row = if setting == "glibc" { &predicted["settings"][0] } else { of(&predicted, setting) };
            if let Some(reason) = row["failed"].as_str() {
                println!("{}: {setting}: {reason}", recorded.name);
                continue;
            }
            let runs: Vec<Measured> = (0..RUNS).map(|_| Measured::of(recorded.command().envs(environment.iter().copied()))).collect();
            let mut line = format!("| {} | {} |", recorded.name, setting.replace(",muzzy_decay_ms=0", ""));
            for (name, truth) in [
                ("peak_bytes", runs.iter().map(|run| run.peak_bytes as f64 - own).collect::<Vec<_>>()),
                ("end_bytes", runs.iter().map(|run| run.end_bytes as f64 - own).collect()),
            ] {
                let (truth, noise) = middle(truth);
                let error = (figure(row, name) / truth - 1.0) * 100.0;
                let (noise, uncertain) = (noise / truth * 100.0, figure(row, "uncertain_ratio") * 100.0);
                let is_outside = error.abs() > uncertain + noise;
                self.outside += usize::from(is_outside);
                self.within_noise += usize::from(error.abs() <= noise.max(10.0));
                self.errors.push(error.abs());
                let mark = if is_outside { " !" } else { "" };
                let _ = write!(line, " {:.1} | {error:+.1} %{mark} | {noise:.1} % |", truth / f64::from(1 << 20));
            }
            means.push((setting, middle(runs.iter().map(|run| run.mean_bytes as f64).collect()).0));
            println!("{line}");
            let _ = writeln!(self.table, "{line}");
        }
        let pick = predicted["pick"].as_str().unwrap().replace("today (glibc)", "glibc");
        let picked = means.iter().find(|one| one.0 == pick).map_or(f64::NAN, |one| one.1);
        let best = means.iter().map(|one| one.1).fold(f64::INFINITY, f64::min);
        println!("{}: picks {pick}, {:+.1} % of the best", recorded.name, (picked / best - 1.0) * 100.0);
        self.picks.push((picked / best - 1.0) * 100.0);
    }

    fn summary(&mut self) -> String {
        self.errors.sort_by(f64::total_cmp);
        let (cells, programs) = (self.errors.len(), self.calibrations.len());
        let most = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        let least = |values: &[f64]| values.iter().copied().fold(f64::INFINITY, f64::min);
        let list: Vec<String> = self.calibrations.iter().map(|(name, percent)| format!("{name} {percent:.1} %")).collect();
        format!(
            "Errors of {cells} figures of {programs} programs under {} settings: median {:.1} %, nine in ten below {:.1} %, largest {:.1} %; \
             {:.0} % are within 10 % or the truth's own noise. {} of them ({:.0} %) are outside their bracket (marked !). The setting that is \
             picked takes at most {:.1} % more on average than the best really run, within 3 % in {} of {programs}. Calibration: {}; within 2 % \
             in {}. {:.1} to {:.1} bytes an event; {:.1} to {:.1} million events a second in the first replay, with its start and its censuses \
             ({}); at most {:.0} MiB beside the replayed heap; two replays differ by {:.2} % at most. \
             Memory that a program maps itself, as a census of it says, is in no figure: {}.\n",
            SETTINGS.len(),
            quantile(&self.errors, 0.5),
            quantile(&self.errors, 0.9),
            quantile(&self.errors, 1.0),
            self.within_noise as f64 * 100.0 / cells as f64,
            self.outside,
            self.outside as f64 * 100.0 / cells as f64,
            most(&self.picks),
            self.picks.iter().filter(|one| **one <= 3.0).count(),
            list.join(", "),
            self.calibrations.iter().filter(|one| one.1 <= 2.0).count(),
            least(&self.bytes),
            most(&self.bytes),
            least(&self.rates) / 1e6,
            most(&self.rates) / 1e6,
            if cfg!(debug_assertions) { "debug build" } else { "release build" },
            most(&self.beside) / f64::from(1 << 20),
            most(&self.differences),
            if self.own.is_empty() { "none has any".to_owned() } else { self.own.join(", ") },
        )
    }
}

#[test]
#[ignore = "runs each program twenty-four times: make bench-whatif"]
fn figures_of_predictions() {
    if bpf().is_none() {
        return;
    }
    let chosen = std::env::var(PROGRAMS).unwrap_or_default();
    let is_chosen = |name: &str| chosen.is_empty() || chosen.split(',').any(|one| one == name);
    let mut figures = Figures::default();
    for recorded in Recorded::all().iter().filter(|recorded| is_chosen(recorded.name)) {
        match recorded.is_installed() {
            true => figures.add(recorded),
            false => println!("{} is not installed", recorded.name),
        }
    }
    let summary = figures.summary();
    println!("{summary}");
    if std::env::var_os("FRAGPROF_BLESS").is_some() {
        let head =
            "| program | setting | peak, MiB | predicted | noise | end, MiB | predicted | noise |\n|---|---|---|---|---|---|---|---|\n";
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/whatif.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (before, rest) = page.split_once(BEGIN).expect("docs/whatif.md has a place for the figures");
        let (_, after) = rest.split_once(END).expect("docs/whatif.md has a place for the figures");
        std::fs::write(path, format!("{before}{BEGIN}{summary}\n{head}{}{END}{after}", figures.table)).unwrap();
    }
}
