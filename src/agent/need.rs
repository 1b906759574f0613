//! Which processes are attributed, when not all can be. Pure.
//!
//! Need is measured in bytes: the growth of the heap since the last choice, its free bytes, and a tenth of its resident memory. A process
//! that is attributed already stays unless another one's need is half as much again, so that windows have time to measure.

use crate::model::sample::Identity;

/// Factor by which another process's need must exceed that of an attributed one to replace it.
const KEEP: f64 = 1.5;

/// A process that may be attributed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// The process.
    pub identity: Identity,
    /// Bytes by which its heap grew since the last choice.
    pub grown_bytes: u64,
    /// Free bytes that its heap holds.
    pub free_bytes: u64,
    /// Resident bytes.
    pub rss_bytes: u64,
    /// Whether it is attributed now.
    pub chosen: bool,
}

impl Candidate {
    /// Bytes of need.
    #[must_use]
    pub fn need(&self) -> f64 {
        let need = self.grown_bytes as f64 + self.free_bytes as f64 + self.rss_bytes as f64 / 10.0;
        if self.chosen { need * KEEP } else { need }
    }
}

/// The processes to attribute, at most `targets_max`, those in most need first.
#[must_use]
pub fn choose(mut candidates: Vec<Candidate>, targets_max: usize) -> Vec<Identity> {
    candidates.sort_by(|a, b| b.need().total_cmp(&a.need()).then(a.identity.cmp(&b.identity)));
    candidates.into_iter().take(targets_max).map(|candidate| candidate.identity).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessId;
    use crate::units::Pid;

    fn candidate(pid: u32, grown_bytes: u64, free_bytes: u64, rss_bytes: u64, chosen: bool) -> Candidate {
        let identity = Identity { process: ProcessId { pid: Pid(pid), start_ticks: 1 }, stack: 1 };
        Candidate { identity, grown_bytes, free_bytes, rss_bytes, chosen }
    }

    fn pids(candidates: Vec<Candidate>, most: usize) -> Vec<u32> {
        choose(candidates, most).into_iter().map(|identity| identity.process.pid.0).collect()
    }

    #[test]
    fn growing_and_hoarding_processes_come_before_large_ones() {
        let large = candidate(1, 0, 0, 1 << 30, false);
        let growing = candidate(2, 200 << 20, 0, 300 << 20, false);
        let hoarding = candidate(3, 0, 500 << 20, 600 << 20, false);
        assert_eq!(pids(vec![large, growing, hoarding], 2), [3, 2]);
    }

    #[test]
    fn an_attributed_process_stays_against_similar_ones() {
        let mine = candidate(1, 100, 0, 0, true);
        assert_eq!(pids(vec![mine, candidate(2, 140, 0, 0, false)], 1), [1]);
        assert_eq!(pids(vec![mine, candidate(2, 160, 0, 0, false)], 1), [2]);
    }
}
