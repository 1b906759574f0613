//! With the interval of production, live bytes by site are estimated without bias and with the stated error.

use std::io::Write as _;
use std::path::Path;

use fragprof::sampler::library::Flavour;

use super::consumer::{Consumer, Ledger};
use super::programs::{Allocator, Libraries, compile, sampled};
use crate::support::process::Process;
use crate::support::{LIMIT, serial};

/// Sites of `sites.c`.
const SITES: usize = 8;

/// Runs `sites.c` with a consumer: live bytes by site, actual and sampled, and the ledger.
fn run_sites(
    consumer: &mut Consumer,
    library: &Path,
    program: &Path,
    allocator: Allocator,
    interval: u64,
    arguments: &[&str],
) -> ([u64; SITES], [u64; SITES], Ledger) {
    let (numbers, ledger) = consumer.numbers_and_ledger(library, sampled(program, library, allocator, interval).args(arguments));
    let truth: [u64; SITES] = std::array::from_fn(|site| numbers[site] as u64);
    let mut told = [0; SITES];
    for block in ledger.live.values() {
        // The program's own tables of blocks are large and belong to no site.
        if let Some(site) = (0..SITES).find(|site| (64 << site..(64 << site) + 32).contains(&block.size_bytes)) {
            told[site] += block.weight_bytes;
        }
    }
    (truth, told, ledger)
}

#[test]
fn live_bytes_by_site_lie_within_the_poisson_interval_as_often_as_stated() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "sites.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let interval = 64 << 10;
    let (mut inside, mut all, mut signed) = (0, 0, 0.0);
    for _ in 0..40 {
        let (truth, told, ledger) = run_sites(&mut consumer, &library, &program, Allocator::Glibc, interval, &["2", "40000", "1024"]);
        assert_eq!(ledger.collisions, 0);
        for (truth, told) in truth.into_iter().zip(told) {
            // The weight is a Poisson-distributed number times the interval: its variance is the interval times the live bytes.
            let deviation = (told as f64 - truth as f64) / (interval as f64 * truth as f64).sqrt();
            inside += u32::from(deviation.abs() <= 1.96);
            signed += deviation;
            all += 1;
        }
    }
    // 320 draws: 95 % give 304; 3.5 standard deviations of that count are 14. The mean's standard error is 0.056.
    assert!(inside >= 290, "{inside} of {all} within the 95 % interval");
    let mean: f64 = signed / f64::from(all);
    assert!(mean.abs() < 0.22, "biased: the mean deviation is {mean:.3} standard errors");
}

#[test]
fn the_number_of_samples_is_as_predicted_by_the_allocated_bytes() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "sites.c", "cc", &[]);
    let mut consumer = Consumer::new();
    for allocator in [Allocator::Glibc, Allocator::Jemalloc, Allocator::Tcmalloc, Allocator::Mimalloc] {
        let (truth, _, ledger) = run_sites(&mut consumer, &library, &program, allocator, 16 << 10, &["4", "100000", "64"]);
        assert!(truth.iter().all(|&bytes| bytes > 0));
        // 4 threads × 100,000 rounds × 4 blocks, sizes 64 << site (mean over 8 sites 2040) plus 0..31 (mean 15.5).
        let bytes = 4.0 * 100_000.0 * 4.0 * (2040.0 + 15.5);
        let expected = bytes / f64::from(16 << 10);
        let samples: f64 = ledger
            .made
            .iter()
            .filter(|block| block.size_bytes < 64 << 8)
            .map(|block| block.weight_bytes as f64 / f64::from(16 << 10))
            .sum();
        let error = (samples - expected) / expected.sqrt();
        // The sizes are random too: four times 1.6 M of them, which adds at most 0.1 %.
        assert!(
            error.abs() < 4.0 + 0.001 * expected / expected.sqrt(),
            "{allocator:?}: {samples} samples, {expected:.0} expected: {error:.1} sigma"
        );
    }
}

#[test]
fn a_listener_that_attaches_and_detaches_causes_no_bias() {
    if crate::support::bpf().is_none() {
        return;
    }
    let _alone = serial();
    let libraries = Libraries::new();
    let library = libraries.path(Flavour::Standard);
    let program = compile(libraries.folder(), "sites.c", "cc", &[]);
    let mut consumer = Consumer::new();
    let mut process = Process::start_piped(sampled(&program, &library, Allocator::Glibc, 4096).args(["2", "300000000", "256"]));
    let mut input = process.input();
    input.write_all(b"g").unwrap();
    let mut seen = 0;
    for _ in 0..6 {
        consumer.attach(process.pid() as i32, &library);
        let mut ledger = Ledger::default();
        let deadline = std::time::Instant::now() + LIMIT;
        while ledger.made.len() < 500 && process.is_running() {
            ledger.add(&consumer.records());
            assert!(std::time::Instant::now() < deadline);
        }
        consumer.detach();
        ledger.add(&consumer.records());
        assert_eq!(ledger.collisions, 0, "a sampled block's free was not reported");
        seen += ledger.made.len();
    }
    assert!(seen >= 500, "{seen}");
    drop(input);
    process.signal(rustix::process::Signal::KILL);
}
