//! Which process gives memory back next. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::agent::config::ReclaimConfig;
use crate::process::ProcessId;

/// A call that gave back less than this share of what was predicted, or took this many times longer, was a disappointment.
const GIVEN_BACK_RATIO_MIN: f64 = 0.8;
const TOOK_RATIO_MAX: f64 = 2.0;
/// What a call may take beyond that without being called slow: its thread may have to wait for a processor.
const TOOK_SLACK: Duration = Duration::from_millis(20);
/// A call was in vain if the process has taken this share of what it gave back again before its next call is due.
const TAKEN_AGAIN_RATIO: f64 = 0.5;
/// What a process takes again within the quiet time it needs all the time, and is not counted as a gain of its next call: free memory that
/// changes hands is trimmable at each moment. After this many intervals without a call it is forgotten, since programs change.
const NEEDED_FOR_INTERVALS: u32 = 16;
/// The interval is doubled after each call in vain, up to this many times the configured one.
const INTERVAL_FACTOR_MAX: u32 = 64;
/// An attempt that was refused is repeated after this time, doubled for each further one, at most after the interval: most refusals are of the
/// moment, and a call that comes an interval later may come right before the memory is needed again.
const RETRY_FIRST: Duration = Duration::from_secs(10);
/// The window in which calls are counted.
const HOUR: Duration = Duration::from_secs(3600);

/// What the policy knows of a process.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Candidate<'a> {
    /// Its name.
    pub comm: &'a str,
    /// Its cgroups' paths.
    pub cgroups: Vec<&'a str>,
    /// The names of its workload and service, and of its container, or of the pod.
    pub workloads: Vec<String>,
    /// Bytes that a trim would give back, by the last full census.
    pub trimmable_bytes: u64,
    /// Resident bytes of its heaps.
    pub resident_bytes: u64,
    /// Use of its memory limit; `None` without one.
    pub limit_ratio: Option<f64>,
    /// Memory pressure of its cgroup, or of the machine: share of the last ten seconds in which a task waited for memory, in percent.
    pub pressure_percent: f64,
}

/// Whether a rule covers it and the thresholds are passed, with a gain of so many bytes.
#[must_use]
fn is_wanted(config: &ReclaimConfig, one: &Candidate<'_>, gain_bytes: u64) -> bool {
    config.rules.iter().any(|rule| rule.covers(one.comm, &one.cgroups, &one.workloads))
        && gain_bytes >= config.trimmable_min_mib << 20
        && gain_bytes as f64 * 100.0 >= one.resident_bytes as f64 * config.trimmable_min_percent
        && one.pressure_percent >= config.pressure_min_percent
        && (config.limit_min_percent <= 0.0 || one.limit_ratio.is_some_and(|ratio| ratio * 100.0 >= config.limit_min_percent))
}

/// What was done to a process so far.
#[derive(Debug, Clone, Copy, Default)]
struct Past {
    /// Since when it has been wanted without a break.
    wanted_since: Option<Instant>,
    /// The last call, or attempt.
    last: Option<Instant>,
    /// What the last call gave back, until it is known whether the process takes it again.
    given_back: Option<GivenBack>,
    /// What the process took again within the quiet time after a call.
    needed_bytes: u64,
    /// Times the configured interval, less one.
    longer: u32,
    /// Attempts that were refused since the last call.
    refused: u32,
    is_put_aside: bool,
}

/// The heap after a call.
#[derive(Debug, Clone, Copy)]
struct GivenBack {
    /// Resident bytes after it.
    left_bytes: u64,
    /// With so many resident bytes it has taken too much again.
    again_bytes: u64,
    /// Whether it is known what it took again within the quiet time.
    is_measured: bool,
    /// Whether a sample has shown fewer: earlier ones are from before the call.
    is_seen: bool,
}

impl Past {
    /// Whether the next call is due.
    fn is_due(&self, now: Instant, config: &ReclaimConfig) -> bool {
        let mut interval = Duration::from_secs(config.interval_s).saturating_mul(self.longer.saturating_add(1));
        if let Some(before) = self.refused.checked_sub(1) {
            interval = interval.min(RETRY_FIRST.saturating_mul(1 << before.min(20)));
        }
        self.last.is_none_or(|last| now.saturating_duration_since(last) >= interval)
    }

    /// What a call would give back for longer than a moment.
    fn gain_bytes(&mut self, one: &Candidate<'_>, now: Instant, config: &ReclaimConfig) -> u64 {
        let past = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        if past >= Duration::from_secs(config.interval_s).saturating_mul(NEEDED_FOR_INTERVALS) {
            self.needed_bytes = 0;
        }
        if let Some(given) = self.given_back.as_mut().filter(|given| given.is_seen && !given.is_measured)
            && past >= Duration::from_secs(config.quiet_s)
        {
            given.is_measured = true;
            self.needed_bytes = one.resident_bytes.saturating_sub(given.left_bytes);
        }
        one.trimmable_bytes.saturating_sub(self.needed_bytes)
    }

    /// Judges the last call by the present size of the heap; whether it was in vain.
    fn is_in_vain(&mut self, resident_bytes: u64, is_due: bool) -> bool {
        let Some(given) = &mut self.given_back else { return false };
        let is_high = resident_bytes >= given.again_bytes;
        let was_seen = given.is_seen;
        given.is_seen |= !is_high;
        let is_known = is_due || (is_high && was_seen);
        if !is_known {
            return false;
        }
        self.given_back = None;
        self.longer = if is_high { (2 * self.longer + 1).min(INTERVAL_FACTOR_MAX - 1) } else { 0 };
        is_high
    }
}

/// The state of the policy.
#[derive(Debug, Default)]
pub struct Policy {
    past: BTreeMap<ProcessId, Past>,
    /// Calls of the last hour.
    calls: Vec<Instant>,
    /// Calls after which the process took the memory again.
    in_vain: u64,
}

impl Policy {
    /// Chooses, of the processes that may give something back now, the one that gives back the most. Forgets those that are not listed.
    pub fn choose<'a>(
        &mut self,
        config: &ReclaimConfig,
        now: Instant,
        candidates: impl Iterator<Item = (ProcessId, Candidate<'a>)>,
    ) -> Option<ProcessId> {
        let mut past = std::mem::take(&mut self.past);
        let mut best: Option<(u64, ProcessId)> = None;
        let has_passed = |since: Instant, seconds: u64| now.saturating_duration_since(since) >= Duration::from_secs(seconds);
        for (process, one) in candidates {
            let mut known = past.remove(&process).unwrap_or_default();
            self.in_vain += u64::from(known.is_in_vain(one.resident_bytes, known.is_due(now, config)));
            let gain_bytes = known.gain_bytes(&one, now, config);
            known.wanted_since = is_wanted(config, &one, gain_bytes).then(|| known.wanted_since.unwrap_or(now));
            let is_quiet = known.wanted_since.is_some_and(|since| has_passed(since, config.quiet_s));
            let is_due = known.is_due(now, config);
            self.past.insert(process, known);
            if is_quiet && is_due && !known.is_put_aside && best.is_none_or(|(bytes, _)| gain_bytes > bytes) {
                best = Some((gain_bytes, process));
            }
        }
        self.calls.retain(|call| now.saturating_duration_since(*call) < HOUR);
        let is_full = self.calls.len() >= config.calls_per_hour_max as usize;
        best.filter(|_| !is_full).map(|(_, process)| process)
    }

    /// Notes that a process was tried, whether a call was made or not.
    pub fn tried(&mut self, process: ProcessId, now: Instant, is_made: bool) {
        let past = self.past.entry(process).or_default();
        past.last = Some(now);
        past.refused = if is_made { 0 } else { past.refused.saturating_add(1) };
        if is_made {
            self.calls.push(now);
        }
    }

    /// Notes what a call gave back of a heap with so many resident bytes before it.
    pub fn gave_back(&mut self, process: ProcessId, resident_bytes: u64, given_back_bytes: u64) {
        let kept = (given_back_bytes as f64 * (1.0 - TAKEN_AGAIN_RATIO)) as u64;
        let (left_bytes, again_bytes) = (resident_bytes.saturating_sub(given_back_bytes), resident_bytes.saturating_sub(kept));
        let given = GivenBack { left_bytes, again_bytes, is_measured: false, is_seen: false };
        self.past.entry(process).or_default().given_back = Some(given);
    }

    /// Number of calls after which the process took half of the memory again before its next call was due.
    #[must_use]
    pub fn in_vain(&self) -> u64 {
        self.in_vain
    }

    /// Leaves a process alone from now on.
    pub fn put_aside(&mut self, process: ProcessId) {
        self.past.entry(process).or_default().is_put_aside = true;
    }

    /// Number of processes that are left alone.
    #[must_use]
    pub fn aside(&self) -> usize {
        self.past.values().filter(|past| past.is_put_aside).count()
    }
}

/// Why a process is left alone after a call; `None` if the call did what was predicted.
#[must_use]
pub fn disappointment(predicted_bytes: u64, given_back_bytes: Option<u64>, predicted: Duration, took: Duration) -> Option<String> {
    let given = given_back_bytes? as f64;
    if given < predicted_bytes as f64 * GIVEN_BACK_RATIO_MIN {
        return Some(format!("it gave back {:.0} % of what was predicted", given * 100.0 / predicted_bytes.max(1) as f64));
    }
    (took > predicted.mul_f64(TOOK_RATIO_MAX) + TOOK_SLACK).then(|| format!("the call took {took:.0?} instead of {predicted:.0?}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::config::ProcessRule;
    use crate::units::Pid;

    fn config() -> ReclaimConfig {
        let rule = ProcessRule { command: Some("shop*".into()), ..ProcessRule::default() };
        ReclaimConfig { enabled: true, rules: vec![rule], quiet_s: 10, interval_s: 100, ..ReclaimConfig::default() }
    }

    fn candidate(mib: u64) -> Candidate<'static> {
        Candidate { comm: "shopd", trimmable_bytes: mib << 20, resident_bytes: 2 * (mib << 20), ..Candidate::default() }
    }

    fn id(pid: u32) -> ProcessId {
        ProcessId { pid: Pid(pid), start_ticks: 1 }
    }

    #[test]
    fn a_process_needs_a_rule_that_names_it_and_every_threshold() {
        let config = config();
        let wanted = |config: &ReclaimConfig, one: &Candidate<'_>| is_wanted(config, one, one.trimmable_bytes);
        assert!(wanted(&config, &candidate(100)));
        assert!(!wanted(&config, &candidate(63)), "too few bytes");
        assert!(!wanted(&config, &Candidate { comm: "nginx", ..candidate(100) }));
        assert!(!wanted(&config, &Candidate { resident_bytes: 1000 << 20, ..candidate(100) }), "too small a share");
        let near = ReclaimConfig { limit_min_percent: 80.0, ..config.clone() };
        assert!(!wanted(&near, &candidate(100)), "no limit");
        assert!(wanted(&near, &Candidate { limit_ratio: Some(0.9), ..candidate(100) }));
        let pressed = ReclaimConfig { pressure_min_percent: 5.0, ..config.clone() };
        assert!(!wanted(&pressed, &candidate(100)) && wanted(&pressed, &Candidate { pressure_percent: 6.0, ..candidate(100) }));
        for rules in [vec![], vec![ProcessRule::default()]] {
            assert!(!wanted(&ReclaimConfig { rules, ..config.clone() }, &candidate(100)), "a rule that names nothing covers nothing");
        }
        let rule = ProcessRule { command: Some("shop*".into()), cgroup: Some("/pods/*".into()), workload: Some("web".into()) };
        let narrow = ReclaimConfig { rules: vec![rule], ..config };
        assert!(!wanted(&narrow, &candidate(100)));
        assert!(wanted(&narrow, &Candidate { cgroups: vec!["/pods/a"], workloads: vec!["web".into()], ..candidate(100) }));
    }

    #[test]
    fn the_largest_that_has_been_quiet_is_chosen_and_then_not_again_within_the_interval() {
        let (config, start) = (config(), Instant::now());
        let at = |s: u64| start + Duration::from_secs(s);
        let mut policy = Policy::default();
        let both = || [(id(1), candidate(100)), (id(2), candidate(300))].into_iter();
        assert_eq!(policy.choose(&config, at(0), both()), None, "not quiet yet");
        assert_eq!(policy.choose(&config, at(10), both()), Some(id(2)));
        policy.tried(id(2), at(10), true);
        assert_eq!(policy.choose(&config, at(11), both()), Some(id(1)));
        policy.tried(id(1), at(11), true);
        assert_eq!(policy.choose(&config, at(12), both()), None);
        assert_eq!(policy.choose(&config, at(110), both()), Some(id(2)));
        policy.put_aside(id(2));
        assert_eq!((policy.choose(&config, at(112), both()), policy.aside()), (Some(id(1)), 1));
        let passing = [(id(1), candidate(1))].into_iter();
        assert_eq!(policy.choose(&config, at(220), passing), None);
        assert_eq!(policy.choose(&config, at(221), [(id(1), candidate(100))].into_iter()), None, "its quiet time begins again");
    }

    #[test]
    fn a_refused_attempt_is_repeated_soon_and_then_less_and_less_often() {
        let (config, start) = (ReclaimConfig { quiet_s: 0, ..config() }, Instant::now());
        let mut policy = Policy::default();
        let mut attempts = Vec::new();
        for second in 0..355 {
            let now = start + Duration::from_secs(second);
            if policy.choose(&config, now, [(id(1), candidate(100))].into_iter()).is_some() {
                attempts.push(second);
                // The sixth is made.
                policy.tried(id(1), now, attempts.len() == 6);
            }
        }
        assert_eq!(attempts, [0, 10, 30, 70, 150, 250, 350]);
    }

    #[test]
    fn the_interval_doubles_while_what_was_given_back_is_taken_again() {
        let config = ReclaimConfig { quiet_s: 0, calls_per_hour_max: 100, ..config() };
        let start = Instant::now();
        let mut policy = Policy::default();
        // 200 MiB, of which 100 are given back.
        let choose = |policy: &mut Policy, second: u64, resident_mib: u64| {
            let now = start + Duration::from_secs(second);
            let one = Candidate { resident_bytes: resident_mib << 20, ..candidate(100) };
            let chosen = policy.choose(&config, now, [(id(1), one)].into_iter()).is_some();
            if chosen {
                policy.tried(id(1), now, true);
                policy.gave_back(id(1), 200 << 20, 100 << 20);
            }
            chosen
        };
        assert!(choose(&mut policy, 0, 200));
        assert!(!choose(&mut policy, 1, 200), "the sample is from before the call");
        assert!(!choose(&mut policy, 5, 100));
        assert!(!choose(&mut policy, 9, 160));
        assert_eq!(policy.in_vain(), 1);
        assert!(!choose(&mut policy, 100, 200), "twice the interval");
        assert!(choose(&mut policy, 200, 200));
        assert!(!choose(&mut policy, 399, 200), "no sample showed it small");
        assert!(!choose(&mut policy, 400, 200));
        assert_eq!(policy.in_vain(), 2);
        assert!(choose(&mut policy, 600, 200), "four times the interval");
        assert!(!choose(&mut policy, 999, 120));
        assert!(choose(&mut policy, 1000, 120), "it was kept");
        assert!(!choose(&mut policy, 1001, 120));
        assert_eq!(policy.in_vain(), 2);
        assert!(choose(&mut policy, 1100, 120), "the configured interval again");
    }

    #[test]
    fn what_a_process_takes_again_within_the_quiet_time_is_no_gain_of_the_next_call() {
        let (config, start) = (config(), Instant::now());
        let mut policy = Policy::default();
        let mut choose = |second: u64, resident_mib: u64, trimmable_mib: u64| {
            let now = start + Duration::from_secs(second);
            let one = Candidate { resident_bytes: resident_mib << 20, trimmable_bytes: trimmable_mib << 20, ..candidate(0) };
            let chosen = policy.choose(&config, now, [(id(1), one)].into_iter()).is_some();
            if chosen {
                policy.tried(id(1), now, true);
                policy.gave_back(id(1), resident_mib << 20, trimmable_mib << 20);
            }
            chosen
        };
        assert!(!choose(0, 400, 300));
        assert!(choose(10, 400, 300), "100 MiB are left");
        assert!(!choose(12, 100, 0));
        // Requests take 80 MiB and free them, all the time: they are trimmable whenever one looks.
        for second in (14..400).step_by(2) {
            assert!(!choose(second, 180, 80), "after {second} s");
        }
        // After the next peak a call is worth it again.
        assert!(!choose(400, 400, 300));
        assert!(choose(410, 400, 300));
        // What was learned is forgotten when it is old: programs change.
        assert!(!choose(412, 180, 0));
        assert!(!choose(420, 180, 80));
        assert!(!choose(2009, 180, 80));
        assert!(!choose(2010, 180, 80), "sixteen intervals have passed");
        assert!(choose(2020, 180, 80));
    }

    #[test]
    fn calls_per_hour_are_limited_on_the_whole_node() {
        let config = ReclaimConfig { calls_per_hour_max: 2, quiet_s: 0, interval_s: 1, ..config() };
        let start = Instant::now();
        let mut policy = Policy::default();
        let mut choose = |now: Instant| {
            let chosen = policy.choose(&config, now, [(id(1), candidate(100))].into_iter());
            chosen.into_iter().for_each(|process| policy.tried(process, now, true));
            chosen.is_some()
        };
        let made = (0..10).filter(|&minute| choose(start + Duration::from_secs(minute * 60)));
        assert_eq!(made.count(), 2);
        assert!(choose(start + HOUR));
    }

    #[test]
    fn a_call_that_gives_back_too_little_or_takes_too_long_is_a_disappointment() {
        let ms = Duration::from_millis;
        assert_eq!(disappointment(1000, Some(900), ms(100), ms(150)), None);
        assert_eq!(disappointment(1000, None, ms(100), ms(900)), None, "nothing is known");
        assert!(disappointment(1000, Some(700), ms(100), ms(100)).is_some_and(|why| why.contains("70 %")));
        assert!(disappointment(1000, Some(1000), ms(100), ms(300)).is_some_and(|why| why.contains("300ms")));
    }
}
