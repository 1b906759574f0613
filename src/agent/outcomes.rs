//! Whether advised settings saved what was predicted: when a process of a workload ends, its remedies are kept; when a later one of the same
//! workload has one of their settings, and is as old as the earlier one was, the two heaps are compared. Pure but for [`settings_of`].
//!
//! It compares two runs, whose load may have differed. What is kept does not outlive the agent; outcomes are written to the history.

use std::collections::BTreeMap;
use std::path::Path;

use crate::allocator::{Allocator, SettingForm};
use crate::fragmentation::verdict::Remedy;
use crate::model::sample::{Identity, ProcessSample};
use crate::process::handle::read_bounded;
use crate::sanitize::terminal;
use crate::store::view::OutcomeView;
use crate::units::{HumanBytes, HumanDuration, Pid};

/// Bytes read of `/proc/PID/environ`; usual ones have some KiB.
const ENVIRONMENT_BYTES_MAX: u64 = 1 << 20;
/// Workloads whose last process is remembered; beyond it no further ones are.
const WORKLOADS_MAX: usize = 1000;
/// A process is compared at this age at the latest, however old the earlier one was.
const AGE_S_MAX: f64 = 86_400.0;

/// Allocators' settings: variable, or variable and key, and value.
pub type Settings = BTreeMap<String, String>;

/// What is known of a running process.
#[derive(Debug)]
struct Running {
    settings: Settings,
    is_checked: bool,
}

/// A process that has ended.
#[derive(Debug)]
struct Ended {
    start_ticks: u64,
    settings: Settings,
    /// Remedies with settings and a prediction.
    remedies: Vec<Remedy>,
    /// At its last full census.
    resident_bytes: u64,
    age_s: f64,
}

/// The processes, and those before them.
#[derive(Debug, Default)]
pub struct Outcomes {
    running: BTreeMap<Identity, Running>,
    /// By workload.
    ended: BTreeMap<String, Ended>,
}

impl Outcomes {
    /// Notes a process that was found, with its settings.
    pub fn started(&mut self, identity: Identity, settings: Settings) {
        self.running.insert(identity, Running { settings, is_checked: false });
    }

    /// Notes that a process has ended, if settings were advised for it.
    pub fn ended(&mut self, one: &ProcessSample) {
        let Some(running) = self.running.remove(&one.identity) else { return };
        let (Some(verdict), Some((resident_bytes, age_s))) = (&one.verdict, at_census(one)) else { return };
        let is_setting = |remedy: &&Remedy| remedy.predicted_bytes.is_some() && !advised(&remedy.action).is_empty();
        let remedies: Vec<Remedy> = verdict.remedies.iter().filter(is_setting).cloned().collect();
        let workload = workload(one);
        if remedies.is_empty() || (self.ended.len() >= WORKLOADS_MAX && !self.ended.contains_key(&workload)) {
            return;
        }
        let start_ticks = one.identity.process.start_ticks;
        self.ended.insert(workload, Ended { start_ticks, settings: running.settings, remedies, resident_bytes, age_s });
    }

    /// Forgets processes that are watched no longer.
    pub fn retain(&mut self, is_watched: impl Fn(&Identity) -> bool) {
        self.running.retain(|identity, _| is_watched(identity));
    }

    /// Compares a process with the last one of its workload, once, if it has a setting that was advised for that one and is old enough.
    pub fn check(&mut self, one: &ProcessSample) -> Option<OutcomeView> {
        let running = self.running.get_mut(&one.identity).filter(|running| !running.is_checked)?;
        if self.ended.is_empty() {
            return None;
        }
        let workload = workload(one);
        let ended = self.ended.get(&workload).filter(|ended| ended.start_ticks < one.identity.process.start_ticks)?;
        let applied = |remedy: &&Remedy| advised(&remedy.action).keys().any(|key| is_new(key, &ended.settings, &running.settings));
        let remedies: Vec<&Remedy> = ended.remedies.iter().filter(applied).collect();
        let first = remedies.first()?;
        let (resident_bytes, age_s) = at_census(one).filter(|&(_, age_s)| age_s >= ended.age_s.min(AGE_S_MAX))?;
        running.is_checked = true;
        // Of settings that were advised together it is not known what each one saved.
        let (action, at_most) = match remedies.as_slice() {
            [only] => (only.action.clone(), only.at_most),
            several => (several.iter().map(|remedy| remedy.action.as_str()).collect::<Vec<_>>().join("; and "), true),
        };
        let predicted_bytes = match remedies.as_slice() {
            [_] => first.predicted_bytes.unwrap_or(0),
            several => several.iter().filter_map(|remedy| remedy.predicted_bytes).fold(0, u64::saturating_add),
        };
        let new: Vec<String> = running
            .settings
            .iter()
            .filter(|(key, _)| is_new(key, &ended.settings, &running.settings))
            .map(|(key, value)| terminal(&format!("{key}={value}")).to_string())
            .collect();
        let basis = format!(
            "{} of resident heap after {}, compared with {} after {} of the process before, which ran without it; their loads may have differed",
            HumanBytes(resident_bytes),
            HumanDuration(age_s),
            HumanBytes(ended.resident_bytes),
            HumanDuration(ended.age_s)
        );
        let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
        let saved_bytes = signed(ended.resident_bytes) - signed(resident_bytes);
        let outcome =
            OutcomeView { workload: workload.clone(), action, applied: new.join(" "), predicted_bytes, at_most, saved_bytes, basis };
        self.ended.remove(&workload);
        Some(outcome)
    }
}

fn is_new(key: &str, before: &Settings, now: &Settings) -> bool {
    now.get(key).is_some_and(|value| before.get(key) != Some(value))
}

/// The name under which outcomes of a process are kept: [`crate::store::outcome::workload`] of a sample.
#[must_use]
pub fn workload(one: &ProcessSample) -> String {
    let container = one.surroundings.container.as_ref();
    container.and_then(|container| container.name.as_ref().or(container.pod.as_ref())).unwrap_or(&one.comm).clone()
}

/// Resident bytes of a process's heaps at its last full census, and its age then, in seconds.
fn at_census(one: &ProcessSample) -> Option<(u64, f64)> {
    let full = one.full.as_ref()?;
    let age = one.identity.process.age().saturating_sub(full.at.elapsed());
    Some((full.census.ladder().resident_bytes, age.as_secs_f64()))
}

/// The settings that a remedy advises, from its words: `GLIBC_TUNABLES=glibc.malloc.arena_max=2` and the like.
fn advised(action: &str) -> Settings {
    let words = action.split_whitespace().map(|word| word.trim_matches(|c: char| "(),;".contains(c)));
    let variables = words.filter_map(|word| word.split_once('='));
    settings(variables.filter(|(name, _)| name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')))
}

/// The allocators' settings among the variables of an environment. A variable that holds several is taken apart.
fn settings<'a>(variables: impl Iterator<Item = (&'a str, &'a str)>) -> Settings {
    let forms: Vec<SettingForm> = Allocator::known().filter_map(|allocator| Some(allocator.row().choice.as_ref()?.form)).collect();
    let mut found = Settings::new();
    for (name, value) in variables {
        let list = forms.iter().find_map(|form| match form {
            SettingForm::List { variable, assign, separator, .. } if *variable == name => Some((*assign, *separator)),
            _ => None,
        });
        let is_own = || forms.iter().any(|form| matches!(form, SettingForm::Each { prefix } if name.starts_with(prefix)));
        if let Some((assign, separator)) = list {
            let pairs = value.split(separator).filter_map(|pair| pair.split_once(assign));
            found.extend(pairs.map(|(key, value)| (format!("{name} {}", key.trim()), value.trim().to_owned())));
        } else if name.starts_with("MALLOC_") || is_own() {
            found.insert(name.to_owned(), value.to_owned());
        }
    }
    found
}

/// The allocators' settings in a process's environment, as it was when the program started.
#[must_use]
pub fn settings_of(pid: Pid) -> Settings {
    let bytes = read_bounded(Path::new(&format!("/proc/{pid}/environ")), ENVIRONMENT_BYTES_MAX).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    settings(text.split('\0').filter_map(|variable| variable.split_once('=')))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::Arc;
    use std::time::{Duration, Instant, SystemTime};

    use super::*;
    use crate::census::{Census, HeapAccount, Level, WalkQuality};
    use crate::fragmentation::verdict::judge;
    use crate::heap::ladder::Ladder;
    use crate::model::sample::TimedCensus;
    use crate::process::ProcessId;

    const ARENAS: &str = "try MALLOC_ARENA_MAX=2 (or GLIBC_TUNABLES=glibc.malloc.arena_max=2) at a restart, and measure";

    /// A process that was `age_s` old at its last census, with 100 MiB predicted for fewer arenas.
    fn sample(pid: u32, start_s: u64, age_s: f64, resident_mib: u64) -> ProcessSample {
        let identity = Identity { process: ProcessId { pid: Pid(pid), start_ticks: start_s * 100 }, stack: 1 };
        let ladder = Ladder { resident_bytes: resident_mib << 20, live_bytes: Some(0), unknown_bytes: Some(0), ..Ladder::default() };
        let census = Census {
            pid,
            comm: "shopd".into(),
            level: Level::Full,
            heaps: vec![HeapAccount { ladder, ..HeapAccount::default() }],
            rss_bytes: 0,
            not_malloc: Vec::new(),
            runtimes: Default::default(),
            walk: WalkQuality::default(),
            layout_unknown: Vec::new(),
        };
        let age = identity.process.age();
        let at = Instant::now().checked_sub(age.saturating_sub(Duration::from_secs_f64(age_s))).unwrap();
        let mut verdict = judge(&census, None);
        verdict.remedies =
            vec![Remedy { action: ARENAS.into(), predicted_bytes: Some(100 << 20), at_most: true, basis: String::new(), setting: None }];
        ProcessSample {
            full: Some(Arc::new(TimedCensus { at, wall: SystemTime::UNIX_EPOCH, cpu: Duration::ZERO, census })),
            verdict: Some(Arc::new(verdict)),
            ..ProcessSample::new(identity, "shopd".into(), 0, 0)
        }
    }

    fn set(text: &str) -> Settings {
        settings([text.split_once('=').unwrap()].into_iter())
    }

    /// What is found of a process with these settings that is 8 s old, after one that had none and was 5 s old.
    fn checked(settings: &str, age_s: f64) -> Option<OutcomeView> {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime).tv_sec as u64;
        let mut outcomes = Outcomes::default();
        let (old, new) = (sample(1, now - 30, 5.0, 300), sample(2, now - 20, age_s, 240));
        outcomes.started(old.identity, Settings::new());
        outcomes.started(new.identity, set(settings));
        assert_eq!(outcomes.check(&new), None, "nothing has ended yet");
        outcomes.ended(&old);
        let found = outcomes.check(&new);
        assert!(found.is_none() || outcomes.check(&new).is_none(), "once");
        found
    }

    #[test]
    fn a_setting_that_is_new_after_a_restart_is_compared_with_its_prediction() {
        for applied in ["MALLOC_ARENA_MAX=1", "GLIBC_TUNABLES=glibc.malloc.tcache_count=3:glibc.malloc.arena_max=2"] {
            let outcome = checked(applied, 8.0).unwrap();
            assert_eq!((outcome.saved_bytes, outcome.predicted_bytes, outcome.at_most), (60 << 20, 100 << 20, true));
            assert_eq!((outcome.action.as_str(), outcome.workload.as_str()), (ARENAS, "shopd"));
            assert!(outcome.basis.contains("240 MiB of resident heap after 8"), "{}", outcome.basis);
            assert!(outcome.applied.contains("rena") || outcome.applied.contains("ARENA"), "{}", outcome.applied);
        }
    }

    #[test]
    fn a_younger_process_and_one_without_the_setting_are_not_compared() {
        assert_eq!(checked("MALLOC_ARENA_MAX=1", 4.0), None);
        assert_eq!(checked("GLIBC_TUNABLES=glibc.malloc.tcache_count=3", 8.0), None);
        assert_eq!(checked("MALLOC_CONF=narenas:4", 8.0), None);
    }

    #[test]
    fn every_setting_that_a_remedy_advises_is_recognised_in_an_environment() {
        let of = |text: &str| advised(text).into_keys().collect::<Vec<_>>();
        assert_eq!(of(ARENAS), ["GLIBC_TUNABLES glibc.malloc.arena_max", "MALLOC_ARENA_MAX"]);
        assert_eq!(
            of("set MALLOC_CONF=background_thread:true,dirty_decay_ms:1000, or call mallctl(\"arena.4096.purge\")"),
            ["MALLOC_CONF background_thread", "MALLOC_CONF dirty_decay_ms"]
        );
        assert_eq!(of("call malloc_trim(0) now and then"), [""; 0]);
        for row in Allocator::known().map(Allocator::row) {
            let texts = row.fewer_arenas.map(|limit| limit.action).into_iter().chain(
                row.caches.iter().flat_map(|caches| caches.arena.into_iter().chain([caches.thread]).map(|cache| cache.remedy.action)),
            );
            texts.for_each(|text| assert!(!advised(text).is_empty(), "{text}"));
        }
    }
}
