//! Verdicts on programs whose correct verdict is known (`owners`): each once in the suite, and as a table of many runs (`make verdicts`).

use std::collections::BTreeMap;

use super::explain;
use super::owners::{OWNERS, Owner, Running, owner};

#[test]
fn live_bytes_that_climb_are_growing_at_the_rate_that_malloc_counts() {
    for name in ["a leak in C", "a slow leak in C"] {
        owner(name).prove();
    }
}

#[test]
fn live_bytes_of_a_python_that_climb_are_growing_at_the_rate_that_malloc_counts() {
    owner("a Python list that is never emptied").prove();
}

#[test]
fn a_cache_that_fills_grows_and_is_healthy_when_it_is_full() {
    owner("an LRU cache that fills").prove();
    owner("an LRU cache that is full").prove();
}

#[test]
fn varying_loads_are_neither_leaks_nor_problems() {
    owner("a load that comes and goes").prove();
    owner("tables that are filled and flushed").prove();
}

#[test]
fn trims_return_the_predicted_bytes_and_not_the_pinned_ones() {
    owner("free pages after a peak").prove();
    owner("survivors on every page").prove();
    owner("free memory of many threads").prove();
}

#[test]
fn a_purge_returns_the_predicted_bytes_of_jemallocs_dirty_pages() {
    owner("jemalloc that keeps dirty pages").prove();
}

#[test]
fn a_large_block_hardly_used_in_huge_pages_is_bloat() {
    let with = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    if with.contains("[never]") || with.is_empty() {
        eprintln!("NO HUGE PAGES: this kernel gives none");
        return;
    }
    owner("a large block in huge pages").prove();
}

#[test]
fn the_malloc_heap_of_a_jvm_has_its_own_verdict_and_its_trim_returns_the_predicted_bytes() {
    owner("a JVM with free pages in malloc's heap").prove();
}

#[test]
fn the_size_of_a_full_java_heap_agrees_with_the_jvm() {
    owner("a JVM with a full Java heap").prove();
}

#[test]
fn growing_memory_outside_malloc_is_reported() {
    owner("mappings of the program's own that grow").prove();
    owner("more and more threads").prove();
}

#[test]
fn idle_programs_are_healthy() {
    owner("an idle Redis").prove();
    owner("a heap in use").prove();
}

/// Options of explain, and how often each program is examined with them.
const LOOKS: [(&[&str], &str, usize); 3] = [(&["--once"], "one census", 4), (&["--over", "3s"], "3 s", 3), (&["--over", "15s"], "15 s", 1)];

/// How often verdicts of a confidence were right.
#[derive(Default)]
struct Tally {
    right: usize,
    all: usize,
}

impl Tally {
    fn add(&mut self, right: bool) {
        self.right += usize::from(right);
        self.all += 1;
    }

    fn percent(&self) -> f64 {
        100.0 * self.right as f64 / self.all.max(1) as f64
    }
}

/// Examines a program as often as the table specifies: options, verdict, confidence.
fn looked_at(running: &Running) -> Vec<(usize, String, String)> {
    let mut said = Vec::new();
    for (index, (options, _, times)) in LOOKS.iter().enumerate() {
        for _ in 0..*times {
            // Some programs grow for only a quarter of a minute: determining owners takes some of it and changes no verdict.
            let verdict = explain(&[&[running.pid().to_string().as_str(), "--no-owners"], *options].concat());
            let text = |key: &str| verdict[key].as_str().unwrap().to_owned();
            said.push((index, text("verdict"), text("confidence")));
        }
    }
    said
}

#[test]
#[ignore = "ten minutes: make verdicts"]
fn table_of_verdicts_by_confidence() {
    let mut verdicts: BTreeMap<(usize, &str), BTreeMap<String, usize>> = BTreeMap::new();
    let mut worth: BTreeMap<(usize, String), Tally> = BTreeMap::new();
    let mut by_confidence: BTreeMap<String, Tally> = BTreeMap::new();
    let tell = |owner: &'static Owner| (owner, looked_at(&owner.start()));
    // Two at a time: programs that follow the clock need CPU time.
    for pair in OWNERS.chunks(2) {
        let done = std::thread::scope(|scope| {
            let threads: Vec<_> = pair.iter().map(|owner| scope.spawn(move || tell(owner))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (owner, said) in done {
            for (looks, verdict, confidence) in said {
                let right = owner.is_right(&verdict);
                *verdicts.entry((looks, owner.name)).or_default().entry(verdict).or_default() += 1;
                worth.entry((looks, confidence.clone())).or_default().add(right);
                by_confidence.entry(confidence).or_default().add(right);
            }
        }
    }
    println!("| program | correct verdict | {} |", LOOKS.map(|(_, name, _)| name).join(" | "));
    println!("|---|---|{}", "---|".repeat(LOOKS.len()));
    for owner in OWNERS {
        let cell = |looks| {
            let said = verdicts.get(&(looks, owner.name)).into_iter().flatten();
            said.map(|(verdict, times)| format!("{verdict} × {times}")).collect::<Vec<_>>().join(", ")
        };
        println!("| {} | {} | {} |", owner.name, owner.answer, (0..LOOKS.len()).map(cell).collect::<Vec<_>>().join(" | "));
    }
    println!("\n| looks | confidence | right | of | share |\n|---|---|---|---|---|");
    for ((looks, confidence), tally) in &worth {
        println!("| {} | {confidence} | {} | {} | {:.0} % |", LOOKS[*looks].1, tally.right, tally.all, tally.percent());
    }
    for (confidence, tally) in &by_confidence {
        println!("| all | {confidence} | {} | {} | {:.0} % |", tally.right, tally.all, tally.percent());
    }
    // The meaning of the words according to docs/verdicts.md.
    for (confidence, least) in [("high", 95.0), ("medium", 75.0)] {
        let tally = by_confidence.get(confidence).unwrap_or_else(|| panic!("no verdict had {confidence} confidence"));
        assert!(tally.percent() >= least, "{confidence}: {} of {}", tally.right, tally.all);
    }
    let leaks = verdicts.iter().filter(|((_, name), _)| owner(name).answer != "leak").any(|(_, said)| said.contains_key("leak"));
    assert!(!leaks, "a leak was reported for a program without one");
}
