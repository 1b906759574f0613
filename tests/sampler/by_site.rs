//! Call sites have sampling intervals of their own: what lives is not drowned by what dies young, and the stated errors hold.

use std::process::Command;

use fragprof::sampler::library::Flavour;

use super::consumer::{Block, Consumer};
use super::programs::{Allocator, Libraries, compile, sampled_by_site};
use crate::support::process::run;
use crate::support::serial;

/// The estimate of some blocks' bytes, and its standard error.
fn estimate<'a>(blocks: impl Iterator<Item = &'a Block>) -> (f64, f64) {
    let (mut bytes, mut variance) = (0.0, 0.0);
    for block in blocks {
        bytes += block.weight_bytes as f64;
        variance += block.weight_bytes as f64 * block.interval_bytes as f64;
    }
    (bytes, variance.sqrt())
}

/// How many standard errors an estimate is off. By the mean interval the truth's own standard error is known: that of an estimate which is too
/// small is too small.
fn deviation(told: f64, stderr: f64, truth: f64) -> f64 {
    let interval = stderr * stderr / told.max(1.0);
    (told - truth) / (interval.max(f64::from(2 << 10)) * truth).sqrt()
}

#[test]
fn a_slow_leak_is_not_drowned_by_churn() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "drowned.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let seconds = 8.0;
    let mut sample = |by_site: bool| {
        let mut command = sampled_by_site(&program, &library, Allocator::Glibc, fragprof::sampler::SAMPLE_BYTES_DEFAULT);
        if !by_site {
            command.env("FRAGPROF_SAMPLE_BY_SITE", "0");
        }
        let (numbers, ledger) = consumer.numbers_and_ledger(&library, command.args([seconds.to_string()]));
        let (told, stderr) = estimate(ledger.live.values().filter(|block| block.size_bytes == 200));
        println!(
            "{} samples of {:.0} MiB, {:.1} MB leaked, {:.1} ± {:.1} told",
            ledger.made.len(),
            numbers[1] / 1048576.0,
            numbers[0] / 1e6,
            told / 1e6,
            stderr / 1e6
        );
        (numbers[0], told, stderr, ledger.made.len())
    };
    let one = sample(false);
    let by_site = sample(true);
    assert!(deviation(by_site.1, by_site.2, by_site.0).abs() < 4.0, "{by_site:?}");
    // With one distance, of which it is a few MB long, nothing can be said of so little.
    assert!(by_site.2 < 0.4 * by_site.0, "{by_site:?}, {one:?} with one distance");
    // And not by taking more.
    assert!(by_site.3 < one.3 + one.3 / 4, "{by_site:?}, {one:?} with one distance");
}

#[test]
fn live_bytes_by_site_lie_within_the_stated_interval_while_the_intervals_adapt() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "sites.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let (mut inside, mut all, mut signed) = (0, 0, 0.0);
    let (mut shortest, mut longest) = (u64::MAX, 0);
    for _ in 0..40 {
        let mut command = sampled_by_site(&program, &library, Allocator::Glibc, 64 << 10);
        // As it allocates 3 GB/s, under the limit there would be a sample in 16 MB, and 1 MB lives at a site.
        command.env("FRAGPROF_SAMPLES_PER_SECOND", "0");
        let (truth, ledger) = consumer.numbers_and_ledger(&library, command.args(["2", "40000", "1024"]));
        for (site, &truth) in truth.iter().enumerate() {
            let blocks = || ledger.live.values().filter(|block| (64 << site..(64 << site) + 32).contains(&block.size_bytes));
            let (told, stderr) = estimate(blocks());
            let deviation = deviation(told, stderr, truth);
            inside += u32::from(deviation.abs() <= 1.96);
            signed += deviation;
            all += 1;
        }
        for block in &ledger.made {
            (shortest, longest) = (shortest.min(block.interval_bytes), longest.max(block.interval_bytes));
        }
    }
    println!("{inside} of {all} within the 95 % interval; intervals of {shortest} to {longest} bytes");
    let mean: f64 = signed / f64::from(all);
    // 320 draws: 95 % give 304; 3.5 standard deviations of that count are 14. The mean's standard error is 0.056.
    assert!(inside >= 290, "{inside} of {all} within the 95 % interval");
    assert!(mean.abs() < 0.22, "biased: the mean deviation is {mean:.3} standard errors");
    assert!(longest >= 16 * shortest, "they do not adapt: {shortest} to {longest} bytes");
}

/// A line of `strata.c`.
#[derive(Debug)]
struct Simulated {
    program: String,
    by_site: bool,
    samples_per_second: f64,
    /// Root of the mean of the squared relative errors of a place's live bytes.
    error: f64,
    /// Mean of the relative errors.
    bias: f64,
    /// Runs of 50 in which the truth lay within the stated 95 % interval.
    inside: f64,
}

fn simulated() -> Vec<Simulated> {
    let libraries = Libraries::new();
    let preload = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/src/sampler/preload");
    let program = compile(libraries.folder(), "strata.c", "cc", &[preload, "-lm"]);
    let done = run(&mut Command::new(&program));
    assert!(done.status.success(), "{}", done.err);
    println!("{}", done.out);
    let line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse().unwrap();
        let [samples_per_second, bias, error, inside] = [2, 4, 5, 6].map(number);
        Simulated { program: words[0].to_owned(), by_site: words[1] == "site", samples_per_second, error, bias, inside }
    };
    done.out.lines().map(line).collect()
}

#[test]
fn errors_are_smaller_at_the_same_number_of_samples_and_stated_rightly() {
    let all = simulated();
    for program in ["drowned", "server"] {
        let of = |by_site| all.iter().filter(move |line| line.program == program && line.by_site == by_site);
        let mut ratios: Vec<f64> = of(false).zip(of(true)).map(|(one, by_site)| one.error / by_site.error).collect();
        ratios.sort_by(f64::total_cmp);
        assert!(ratios[ratios.len() / 2] >= 2.2, "{program}: {ratios:?}");
        let [one, by_site] = [false, true].map(|by_site| of(by_site).next().unwrap().samples_per_second);
        assert!((by_site / one - 1.0).abs() < 0.03, "{program}: {by_site} samples per second, {one} with one distance");
    }
    // A large cache loses little by the leak that is seen beside it.
    let cache: Vec<_> = all.iter().filter(|line| line.program == "cache").collect();
    assert!(cache[3].error < cache[1].error / 1.4 && cache[2].error < 1.6 * cache[0].error, "{cache:?}");
    let by_site: Vec<_> = all.iter().filter(|line| line.by_site).collect();
    let inside: f64 = by_site.iter().map(|line| line.inside).sum::<f64>() / (50.0 * by_site.len() as f64);
    assert!(inside > 0.92, "{inside}");
    // The mean of 50 runs has a seventh of one run's error.
    assert!(by_site.iter().all(|line| line.bias.abs() < 4.0 * line.error / 50f64.sqrt()), "{by_site:?}");
}
