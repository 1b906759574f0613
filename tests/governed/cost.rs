//! Cost of the events that are always traced: growth of the heap, first touches of its pages. `make cost-of-rare-events`.

use std::io::Write as _;
use std::process::{ChildStdin, Command};
use std::time::Duration;

use fragprof::session::tier::windows::{Governed, Options};
use fragprof::units::Pid;

use super::built;
use crate::support::process::Process;
use crate::support::{LIMIT, bpf, serial};

const ROUNDS: usize = 7;

struct Growing {
    process: Process,
    input: ChildStdin,
    asked: usize,
}

impl Growing {
    /// Nanoseconds per `what`.
    fn ns(&mut self, what: &str) -> f64 {
        writeln!(self.input, "{what}").unwrap();
        let line = self.process.out.nth(self.asked, LIMIT).unwrap();
        self.asked += 1;
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measured in turn: alone, with the page-fault program attached for others, and watched itself.
#[test]
#[ignore = "measures"]
fn cost_of_rare_events() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let mut process = Process::start_piped(&mut Command::new(built("growing")));
    let input = process.input();
    let mut growing = Growing { process, input, asked: 0 };
    let mut taken: [[Vec<f64>; 3]; 2] = Default::default();
    for _ in 0..ROUNDS {
        let mut all = |state: usize, growing: &mut Growing| {
            for (what, taken) in ["touch", "brk"].into_iter().zip(&mut taken) {
                taken[state].push(growing.ns(what));
            }
        };
        all(0, &mut growing);
        let mut governed = Governed::new(Options { own_census: false, ..Options::default() }).unwrap();
        all(1, &mut growing);
        governed.watch(Pid(growing.process.pid()), 0.0001).unwrap();
        governed.wait_for_tables(Duration::from_secs(10));
        all(2, &mut growing);
    }
    for (what, taken) in ["a first touch of a page", "a growth of the heap"].into_iter().zip(taken) {
        let [alone, others, watched] = taken.map(median);
        println!(
            "{what}: {alone:.0} ns alone, × {:.3} while others are watched, × {:.3} watched ({:+.0} ns)",
            others / alone,
            watched / alone,
            watched - alone
        );
    }
}
