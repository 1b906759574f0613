//! Faults as in production: processes killed at any moment, limits reached, unusual targets, other tools. In each case the target is
//! unharmed, the report is correct or marked as doubtful, and nothing is left behind.
//!
//! The long forms are ignored tests, run by `make faults`.

mod clocks;
mod killed;
mod limits;
mod names;
mod others;
mod preemption;
mod readers;
mod soak;
mod storms;
mod targets;

use std::path::PathBuf;
use std::time::Duration;

use crate::support::build::{Link, program};
use crate::support::process::wait_until;
use crate::support::rendezvous::Target;
use crate::support::text;
use crate::support::truth::Truth;

/// The entry points that a recording of glibc probes.
const PROBED: [&str; 5] = ["malloc", "free", "calloc", "realloc", "posix_memalign"];

/// A target that allocates, checks and frees in two threads without a pause. See `churn.c`.
struct Churn {
    target: Target,
    libc: PathBuf,
    allocations: u64,
}

impl Churn {
    fn start() -> Self {
        let mut target = Target::start(std::process::Command::new(program("churn", Link::Dynamic)).arg("2"));
        let libc = text::libc_of(target.pid()).unwrap();
        target.rendezvous.go();
        Self { target, libc, allocations: 0 }
    }

    fn pid(&self) -> u32 {
        self.target.pid()
    }

    /// Checks that it still runs and makes progress, with its blocks unchanged.
    fn assert_alive(&mut self) {
        let truth = self.target.rendezvous.expect("alive", &self.target.process);
        self.target.rendezvous.go();
        let now: u64 = truth.sites.iter().map(|site| site.allocations).sum();
        assert!(now > self.allocations, "the target makes no progress");
        self.allocations = now;
    }

    /// Checks that no probe is in its C library.
    fn assert_unprobed(&self) {
        wait_until("the kernel removes the probes", || {
            PROBED.iter().all(|symbol| text::is_probed(self.pid(), &self.libc, symbol) == Some(false))
        });
    }

    /// Ends the churning and returns the ledger.
    fn stop(&mut self) -> Truth {
        self.target.rendezvous.expect("alive", &self.target.process);
        self.target.rendezvous.say(b'e');
        self.target.rendezvous.expect("done", &self.target.process)
    }
}

/// Random moments within a time span, from a generator with a fixed seed, so that a failure can be reproduced.
struct Moments(u64);

impl Moments {
    fn new() -> Self {
        Self(0x9e37_79b9_7f4a_7c15)
    }

    fn within(&mut self, span: Duration) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        span.mul_f64((self.0 >> 11) as f64 / (1u64 << 53) as f64)
    }
}
