//! A trace that a command replays, under one setting after the other.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;

use super::progress::{self, Said};
use crate::census::LayoutCache;
use crate::error::{ExitStatus, Failed};
use crate::replay::forecast::END_TO;
use crate::replay::{Blocks, Limits, Replay, ReplayError, Scenario, Setting, Survey, replay};
use crate::sanitize::terminal;
use crate::trace::MAGIC;

/// Censuses of each replay, beside those at the times of the recording's own.
const CENSUSES: u64 = 8;
/// Of the recording's own, so many are compared at most.
const COMPARED_MAX: usize = 48;

/// A trace, and the limits of its replays.
pub(super) struct Replayer<'a> {
    path: &'a Path,
    /// What it contains.
    pub(super) survey: Survey,
    limits: Limits,
    layouts: LayoutCache,
}

impl<'a> Replayer<'a> {
    /// Reads the trace once. `memory_mib`: what the recorded blocks may take, by default three quarters of what is available.
    ///
    /// # Errors
    /// If it is not a trace, or has nothing to replay.
    pub(super) fn open(path: &'a Path, time_max: Option<Duration>, memory_mib: Option<u64>) -> anyhow::Result<Self> {
        let survey = Survey::of(open(path)?).map_err(|error| invalid(path, &error.to_string()))?;
        survey.check().map_err(|reason| invalid(path, &reason))?;
        let defaults = Limits::default();
        let heap_bytes_max = memory_mib.map_or(defaults.heap_bytes_max, |mib| mib.saturating_mul(1 << 20));
        let limits = Limits { heap_bytes_max, time_max: time_max.unwrap_or(defaults.time_max), ..defaults };
        Ok(Self { path, survey, limits, layouts: LayoutCache::of_malloc() })
    }

    /// Evenly spread times, the last one before the teardown.
    pub(super) fn even(&self) -> Vec<u64> {
        let (began, duration) = (self.survey.began_ns, self.survey.duration_ns());
        let end = u128::from(duration) * u128::from(END_TO) / 1000;
        (1..=CENSUSES).map(|nth| began.saturating_add((end * u128::from(nth) / u128::from(CENSUSES)) as u64)).collect()
    }

    /// The times of the recording's censuses, or some of them.
    pub(super) fn compared(&self) -> Vec<u64> {
        let accounts: Vec<u64> = self.survey.steady_accounts().map(|account| account.time_ns).collect();
        let every = accounts.len().div_ceil(COMPARED_MAX).max(1);
        accounts.into_iter().rev().step_by(every).collect()
    }

    /// A replay of all blocks under a setting, with a look at the stacks at the last of the even times.
    ///
    /// # Errors
    /// As [`Self::replay`].
    pub(super) fn replay_all(&mut self, setting: &Setting, mut census_at_ns: Vec<u64>) -> anyhow::Result<Replay> {
        census_at_ns.sort_unstable();
        census_at_ns.dedup();
        let by_stack_at_ns = self.even().last().copied();
        let scenario = Scenario { environment: setting.environment.clone(), census_at_ns, by_stack_at_ns, ..Scenario::default() };
        self.replay(&scenario, &setting.label)
    }

    /// A replay of some blocks under a setting, without censuses.
    ///
    /// # Errors
    /// As [`Self::replay`].
    pub(super) fn replay_blocks(&mut self, setting: &Setting, blocks: Blocks, what: &str) -> anyhow::Result<Replay> {
        let scenario = Scenario { environment: setting.environment.clone(), blocks, ..Scenario::default() };
        self.replay(&scenario, what)
    }

    /// Replays it. `what`: named while it is done.
    ///
    /// # Errors
    /// If the trace cannot be read any more, or no process can be started.
    pub(super) fn replay(&mut self, scenario: &Scenario, what: &str) -> anyhow::Result<Replay> {
        let what = format!("replaying: {}", terminal(what));
        let shown = progress::show(move || Said { what: what.clone(), share: None });
        let done = replay(open(self.path)?, &self.survey, scenario, self.limits, &mut self.layouts);
        drop(shown);
        match done {
            Ok(done) => Ok(done),
            Err(error @ ReplayError::Trace(_)) => Err(invalid(self.path, &error.to_string()).into()),
            Err(error @ ReplayError::Player(_)) => Err(error).context(Failed::new(ExitStatus::Unsupported, "nothing can be replayed")),
        }
    }
}

/// Whether a file begins as a trace does.
pub(super) fn is_trace(path: &Path) -> bool {
    let mut first = [0; MAGIC.len()];
    File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut first)).is_ok() && first == MAGIC
}

fn open(path: &Path) -> anyhow::Result<BufReader<File>> {
    let file = File::open(path).map_err(|error| invalid(path, &error.to_string()))?;
    Ok(BufReader::with_capacity(1 << 20, file))
}

fn invalid(path: &Path, reason: &str) -> Failed {
    Failed::new(ExitStatus::Usage, format!("cannot replay {}: {reason}", path.display()))
}
