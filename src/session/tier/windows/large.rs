//! The size-selective probes for large blocks of one governed process: where they are placed, when they are attached, and what is known
//! meanwhile.
//!
//! They have a slot of their own in addition to the target's, so that a burst of large blocks closes only them. While they are attached, a
//! ledger holds every large block allocated since; [`crate::governor::large`] decides how long that is.

use std::path::Path;

use crate::allocator::Allocator;
use crate::allocator::functions::{Family, FunctionId, find as find_function};
use crate::bpf;
use crate::capture::{AttachFile, AttachSite, Attached, Capture, Hits, Slot, TargetFlags, TargetLoss};
use crate::governor::large::PIECE_S;
use crate::governor::{HitCosts, LargePace, Left};
use crate::ledger::Ledger;
use crate::probe::cookie::{LargeOp, encode_large};
use crate::probe::plan::{FilePlan, Plan};
use crate::process::Process;
use crate::process::handle::read_bounded;
use crate::selective::builds::{KnownSites, find_now};
use crate::selective::{Holds, LargeSite, LargeSites, SEEN_FROM_BYTES};
use crate::session::monotonic_ns;
use crate::session::reaper::Ticket;
use crate::session::tier::windows::spent::spent;
use crate::session::tier::windows::state::{LargeState, lock};
use crate::session::tier::windows::target::{Tools, is_lossy};
use crate::units::{Pid, grouped};

/// What attaching or detaching these probes costs a running target, in seconds (see `AROUND_WINDOW_S` of [`crate::governor::pace`]).
const AROUND_S: f64 = 0.001;
/// Seconds until another attempt to attach probes that could not be attached.
const RETRY_S: f64 = 60.0;
/// Maximum number of large blocks in a ledger: at most 32 bytes each, so 32 MiB per process.
const LIVE_MAX: u64 = 1 << 20;
/// Linux limits arguments and environment to three quarters of an 8 MiB stack (fs/exec.c, bprm_stack_limits).
const ENVIRONMENT_BYTES_MAX: u64 = 6 << 20;
/// Functions whose large blocks reach the sites, or that only call a probed function.
const SEEN_AT_SITES: [&str; 5] = ["malloc", "calloc", "free", "cfree", "reallocarray"];

/// The process that the probes are in.
pub struct Owner {
    pub pid: Pid,
    /// Its slot as a target.
    pub slot: Slot,
    /// When it was first watched, in seconds of the driver's clock.
    pub began_s: f64,
    /// Its running time per second.
    pub load: f64,
}

impl Owner {
    /// What attaching or detaching the probes costs it, in seconds: nothing while it sleeps.
    fn around_s(&self) -> f64 {
        AROUND_S * self.load.min(1.0)
    }
}

/// Where the probes are placed.
enum Place {
    At(AttachFile),
    /// The sites of its glibc build are being determined.
    Sought,
    /// No place, with the reason.
    Nowhere(String),
}

/// Attached probes.
struct In {
    attached: Attached,
    piece_s: f64,
    hits: Hits,
    loss: TargetLoss,
    /// Large blocks allocated or freed up to then.
    large: u64,
}

/// Hits of a piece that was too expensive.
#[derive(Debug, Clone, Copy)]
struct Passed {
    hits: u64,
    large: u64,
    seconds: f64,
}

impl Passed {
    /// A sentence, if most hits were of small blocks: small blocks that miss the thread cache pass the same sites.
    fn words(self) -> Option<String> {
        let small = self.hits.saturating_sub(self.large);
        let per_s = |count: u64| grouped((count as f64 / self.seconds.max(1e-3)).round() as u64);
        (small > self.large).then(|| {
            format!(
                "small blocks that the thread cache cannot supply or take pass the same sites: {} hits a second in addition to {} of large \
                 blocks, which costs more than their part of the budget",
                per_s(small),
                per_s(self.large)
            )
        })
    }
}

enum State {
    /// Not attached; next attempt at this time, in seconds of the driver's clock.
    Out(f64),
    In(In),
    /// The process is no longer watched; its state holds what was known then.
    Ended,
}

/// How size-selective probes ended.
pub struct Stopped {
    /// Whether the ledger remains valid: once the ring is read, it holds everything that was known at this moment.
    pub is_whole: bool,
    /// Seconds that the process lost to them since they were last accounted for.
    pub lost_s: f64,
}

/// The probes for large blocks of one process.
pub struct Large {
    place: Place,
    slot: Option<Slot>,
    pace: LargePace,
    state: State,
    /// Hits when detaching began, until it is complete: some hits arrive meanwhile.
    tail: Option<(Hits, f64, Ticket)>,
    /// Why they were detached last; `None` once they are attached again.
    left: Option<Left>,
    passed: Option<Passed>,
    /// Why the last attempt to attach them failed.
    failed: Option<String>,
    /// How often they were attached, and how often detached again for their cost or for losses.
    pub trials: u64,
    pub times_left: u64,
    /// Blocks that were known when the probes were detached.
    pub dropped: u64,
    /// Seconds that they are estimated to have cost the process.
    pub lost_s: f64,
    /// When they were last attached, in seconds after the process was first watched.
    pub since_s: f64,
}

impl Large {
    /// For a process that has not been examined yet. `wanted`: if `false`, the probes are never attached.
    pub fn new(budget: f64, costs: HitCosts, wanted: bool) -> Self {
        let place = Place::Nowhere(if wanted { "not examined yet" } else { "switched off" }.to_owned());
        Self {
            place,
            slot: None,
            pace: LargePace::new(budget, costs),
            state: if wanted { State::Out(0.0) } else { State::Ended },
            tail: None,
            left: None,
            passed: None,
            failed: None,
            trials: 0,
            times_left: 0,
            dropped: 0,
            lost_s: 0.0,
            since_s: 0.0,
        }
    }

    /// Determines the probe sites. Probes that are attached stay where they are.
    pub fn look(&mut self, process: &Process, plan: &Plan, known: &mut KnownSites) {
        if !matches!(self.state, State::Ended) {
            self.place = match glibc_of(process, plan) {
                Ok(glibc) => match known.of(process, glibc) {
                    Some(Ok(sites)) => Place::At(attach_file(glibc, &sites)),
                    Some(Err(reason)) => Place::Nowhere(reason),
                    None => Place::Sought,
                },
                Err(reason) => Place::Nowhere(reason),
            };
        }
    }

    /// Whether its glibc build is being examined: once that is done, [`look`](Self::look) must run again.
    pub fn waits_for_sites(&self) -> bool {
        matches!(self.place, Place::Sought)
    }

    /// Changes the budget from now on.
    pub fn set_budget(&mut self, budget: f64) {
        self.pace.set_budget(budget);
    }

    /// The share of the process's time that they take.
    pub fn reserved(&self) -> f64 {
        self.pace.reserved()
    }

    /// Hits so far.
    pub fn hits(&self, capture: &Capture) -> u64 {
        self.slot.map(|slot| capture.hits(slot)).map_or(0, |hits| hits.allocations + hits.frees)
    }

    /// Whether they are attached.
    pub fn is_in(&self) -> bool {
        matches!(self.state, State::In(_))
    }

    /// Whether the ledger's large blocks may be reported: the probes passed their trial and are attached, or were until the process ended.
    pub fn tells(&self) -> bool {
        match self.state {
            State::In(_) => self.pace.is_kept(),
            State::Ended => self.left.is_none(),
            State::Out(_) => false,
        }
    }

    /// The tracing state as a word, and the reason.
    pub fn words(&self) -> (&'static str, String) {
        let nowhere = match &self.place {
            Place::At(_) => None,
            Place::Sought => Some("its build of glibc is not known and is being examined"),
            Place::Nowhere(reason) => Some(reason.as_str()),
        };
        let reason = self.failed.as_deref().or(nowhere);
        match (&self.state, self.left, reason) {
            (State::In(_), _, _) if self.pace.is_kept() => ("kept", String::new()),
            (State::In(_), _, _) => ("tried", String::new()),
            (State::Ended, None, _) if self.trials > 0 => ("kept", String::new()),
            (_, Some(left @ (Left::OverShare | Left::Burst)), _) => {
                ("left", self.passed.and_then(Passed::words).unwrap_or_else(|| left.words().to_owned()))
            }
            (_, Some(left), _) => ("left", left.words().to_owned()),
            (_, None, Some(reason)) => ("none", reason.to_owned()),
            (_, None, None) => ("none", "they were not attached yet".to_owned()),
        }
    }

    /// Does what is due. Returns the seconds that the process is estimated to have lost meanwhile. `full`: it is fully traced now.
    pub fn advance(&mut self, tools: &Tools<'_>, whose: &Owner, full: bool) -> f64 {
        let tail_s = self.tail_s(tools);
        let lost_s = match std::mem::replace(&mut self.state, State::Ended) {
            State::Out(until_s) if !full && tools.now_s >= until_s && matches!(self.place, Place::At(_)) => self.begin(tools, whose),
            State::In(probes) => self.while_in(tools, probes, whose, full),
            state => {
                self.state = state;
                0.0
            }
        };
        tail_s + lost_s
    }

    /// Time lost during detaching, once that is complete.
    fn tail_s(&mut self, tools: &Tools<'_>) -> f64 {
        let Some((before, since_s, _)) = self.tail.take_if(|(_, _, ticket)| ticket.is_out()) else { return 0.0 };
        let Some(slot) = self.slot else { return 0.0 };
        let lost_s = tools.costs.spent_s(spent(tools.capture.hits(slot)).since(spent(before))).min(tools.now_s - since_s);
        self.lost_s += lost_s;
        lost_s
    }

    fn begin(&mut self, tools: &Tools<'_>, whose: &Owner) -> f64 {
        self.state = State::Out(tools.now_s + RETRY_S);
        let Place::At(file) = &self.place else { return 0.0 };
        let flags = TargetFlags(bpf::TARGET_STACKS | bpf::TARGET_GOVERNED);
        let attached = self.slot.map_or_else(|| tools.capture.add_beside(whose.pid, tools.ring, flags), Ok).and_then(|slot| {
            self.slot = Some(slot);
            Ok((slot, tools.capture.attach_large(whose.pid, slot, file)?))
        });
        let (slot, attached) = match attached {
            Ok(both) => both,
            Err(error) => {
                self.failed = Some(error.to_string());
                return 0.0;
            }
        };
        let (hits, loss) = (tools.capture.hits(slot), tools.capture.loss(slot));
        let now_ns = monotonic_ns();
        lock(tools.states).begin_large(whose.slot.index, LargeState::new(slot, now_ns));
        tools.capture.open_beside(slot, self.pace.quota(), u64::MAX);
        self.trials += 1;
        self.since_s = tools.now_s - whose.began_s;
        (self.left, self.failed) = (None, None);
        self.lost_s += whose.around_s();
        self.state = State::In(In { attached, piece_s: tools.now_s, hits, loss, large: 0 });
        whose.around_s()
    }

    fn while_in(&mut self, tools: &Tools<'_>, mut probes: In, whose: &Owner, full: bool) -> f64 {
        let Some(slot) = self.slot else { return 0.0 };
        let hits = tools.capture.hits(slot);
        let open_s = tools.now_s - probes.piece_s;
        if hits.closed_ns.is_none() && open_s < PIECE_S && !full {
            self.state = State::In(probes);
            return 0.0;
        }
        let lost_s = tools.costs.spent_s(spent(hits).since(spent(probes.hits)));
        self.lost_s += lost_s;
        let (live, large) = lock(tools.states)
            .of
            .get(&whose.slot.index)
            .and_then(|state| state.large.as_ref())
            .map_or((0, 0), |large| (large.live(), large.calls()));
        let hits_here = spent(hits).since(spent(probes.hits)).hits();
        self.passed = Some(Passed { hits: hits_here, large: large - probes.large, seconds: open_s });
        let left = if full {
            Some(Left::Full)
        } else if is_lossy(tools.capture.loss(slot), probes.loss) {
            Some(Left::Lossy)
        } else if hits.closed_ns.is_some() {
            Some(Left::Burst)
        } else if live > LIVE_MAX {
            Some(Left::TooMany)
        } else {
            self.pace.piece(lost_s, open_s)
        };
        match left {
            Some(why) => {
                self.leave(tools, probes.attached, whose, why);
                lost_s + whose.around_s()
            }
            None => {
                tools.capture.extend(slot, self.pace.quota());
                (probes.piece_s, probes.hits, probes.large) = (tools.now_s, hits, large);
                self.state = State::In(probes);
                lost_s
            }
        }
    }

    /// Detaches the probes. Discards the ledger: from now on frees are missed.
    fn leave(&mut self, tools: &Tools<'_>, attached: Attached, whose: &Owner, why: Left) {
        if let Some(slot) = self.slot {
            tools.capture.switch(slot, false);
        }
        self.dropped += lock(tools.states).end_large(whose.slot.index).map_or(0, |state| state.live());
        let ticket = tools.reaper.take_out(attached);
        self.tail = self.slot.map(|slot| (tools.capture.hits(slot), tools.now_s, ticket));
        self.left = Some(why);
        self.times_left += u64::from(why != Left::Full);
        self.lost_s += whose.around_s();
        self.state = State::Out(tools.now_s + self.pace.left(why));
    }

    /// Detaches the probes at the end of the process or of the recording.
    pub fn stop(&mut self, tools: &Tools<'_>, owner: Slot) -> Stopped {
        let tail_s = self.tail_s(tools);
        let (State::In(probes), Some(slot)) = (std::mem::replace(&mut self.state, State::Ended), self.slot) else {
            drop(lock(tools.states).end_large(owner.index));
            return Stopped { is_whole: false, lost_s: tail_s };
        };
        let hits = tools.capture.hits(slot);
        tools.capture.switch(slot, false);
        let is_whole = hits.closed_ns.is_none() && !is_lossy(tools.capture.loss(slot), probes.loss);
        let lost_s = tools.costs.spent_s(spent(hits).since(spent(probes.hits)));
        self.lost_s += lost_s;
        drop(tools.reaper.take_out(probes.attached));
        if !is_whole {
            self.left = Some(if hits.closed_ns.is_some() { Left::Burst } else { Left::Lossy });
            self.times_left += 1;
            self.dropped += lock(tools.states).end_large(owner.index).map_or(0, |state| state.live());
        }
        Stopped { is_whole, lost_s: tail_s + lost_s }
    }

    /// Frees its slot.
    pub fn forget(&mut self, capture: &Capture, pid: Pid) {
        if let Some(slot) = self.slot.take()
            && let Err(error) = capture.remove_target(pid, slot)
        {
            tracing::warn!("{error}");
        }
    }
}

/// The glibc that serves a process's large blocks, or why no complete ledger of them is possible.
fn glibc_of<'a>(process: &Process, plan: &'a Plan) -> Result<&'a FilePlan, String> {
    let is_other = |allocator: Allocator| !matches!(allocator, Allocator::Glibc | Allocator::Other);
    if let Some(other) = plan.files.iter().find(|file| is_other(file.allocator)) {
        return Err(format!("the process has another allocator, {}", other.allocator.name()));
    }
    let glibc = plan.files.iter().find(|file| file.allocator == Allocator::Glibc && file.serves_malloc);
    let Some(glibc) = glibc else { return Err("the process's malloc is not that of a shared glibc".to_owned()) };
    match raised_cache_bytes(process) {
        Some(bytes) => Err(format!("glibc.malloc.tcache_max is {bytes}: the thread cache takes large blocks too")),
        None => Ok(glibc),
    }
}

/// The number of sites in a process's allocator that only large blocks reach, or why large blocks cannot be watched separately. A build
/// that is neither shipped nor in the directory `store` is examined, which takes seconds; the result is not stored.
///
/// # Errors
/// The reason, as a sentence.
pub fn large_places(process: &Process, plan: &Plan, store: Option<&Path>) -> Result<usize, String> {
    let glibc = glibc_of(process, plan)?;
    let sites = find_now(process, glibc, store)?;
    Ok(attach_file(glibc, &sites).sites.iter().filter(|site| !site.with_return).count())
}

/// All sites of one file: those that large blocks reach, and the functions that have none.
fn attach_file(glibc: &FilePlan, sites: &LargeSites) -> AttachFile {
    let function = |name: &[u8]| find_function(Family::C, name).unwrap_or(crate::allocator::functions::FunctionId(u8::MAX));
    let (malloc, free) = (function(b"malloc"), function(b"free"));
    let allocs = sites.allocs.iter().map(|site| (site, site_cookie(LargeOp::Alloc, malloc, site)));
    let frees = sites.frees.iter().map(|site| (site, site_cookie(LargeOp::Free, free, site)));
    let selective =
        allocs.chain(frees).map(|(site, cookie)| AttachSite { offset: crate::units::FileOffset(site.offset), cookie, with_return: false });
    let calls = glibc.sites.iter().filter(|site| site.allocator == Allocator::Glibc && site.cookie.op.needs_return());
    let calls = calls.filter(|site| !site.symbols.iter().any(|symbol| SEEN_AT_SITES.contains(&symbol.as_str())));
    let calls = calls.map(|site| AttachSite { offset: site.offset, cookie: site.cookie.encode(0), with_return: true });
    AttachFile { path: glibc.attach_path.clone(), sites: selective.chain(calls).collect() }
}

/// The largest block that the process's thread caches accept, if that was raised above the default (possible since glibc 2.42).
fn raised_cache_bytes(process: &Process) -> Option<u64> {
    let environment = read_bounded(&process.directory().join("environ"), ENVIRONMENT_BYTES_MAX).ok()?;
    raised_in(&environment)
}

/// The same from the text of `/proc/PID/environ`: variables end in a zero byte; tunables are `name=value`, separated by colons (glibc's
/// manual, Tunables).
fn raised_in(environment: &[u8]) -> Option<u64> {
    let tunables = environment.split(|&byte| byte == 0).find_map(|variable| variable.strip_prefix(b"GLIBC_TUNABLES="))?;
    let values = std::str::from_utf8(tunables).ok()?.split(':').filter_map(|one| one.strip_prefix("glibc.malloc.tcache_max="));
    let number = |text: &str| match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    // An unreadable value may be any number.
    values.map(|value| number(value).unwrap_or(u64::MAX)).find(|&bytes| bytes >= SEEN_FROM_BYTES)
}

impl LargeState {
    /// A ledger that starts at this moment (CLOCK_MONOTONIC ns).
    pub fn new(slot: Slot, since_ns: u64) -> Self {
        Self { slot, since_ns, ledger: Ledger::new(since_ns, crate::ledger::StackLimits::default()) }
    }

    /// Live blocks.
    pub fn live(&self) -> u64 {
        self.ledger.totals().live
    }

    /// Allocations and frees of large blocks so far.
    pub fn calls(&self) -> u64 {
        self.ledger.totals().allocations + self.ledger.totals().frees + self.ledger.stats().unknown_frees
    }

    /// Bytes of the live blocks.
    pub fn live_bytes(&self) -> u64 {
        self.ledger.totals().live_bytes
    }
}

/// The cookie of a site, without the target's slot.
fn site_cookie(op: LargeOp, function: FunctionId, site: &LargeSite) -> u64 {
    encode_large(op, function, site.register, site.holds == Holds::Chunk, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn most_hits_by_small_blocks_are_reported_as_the_reason() {
        let words = |hits, large| Passed { hits, large, seconds: 2.0 }.words();
        assert_eq!(words(1_000, 900), None);
        assert!(
            words(60_204, 204).is_some_and(|words| words.contains("30,000 hits a second in addition to 102")),
            "{:?}",
            words(60_204, 204)
        );
    }

    #[test]
    fn only_a_cache_that_takes_larger_blocks_is_raised() {
        assert_eq!(raised_in(b"HOME=/\0GLIBC_TUNABLES=glibc.malloc.tcache_max=65536\0"), Some(65536));
        assert_eq!(raised_in(b"GLIBC_TUNABLES=glibc.malloc.arena_max=2:glibc.malloc.tcache_max=0x1000"), Some(4096));
        assert_eq!(raised_in(b"GLIBC_TUNABLES=glibc.malloc.tcache_max=1032\0A=B\0"), None);
        assert_eq!(raised_in(b"GLIBC_TUNABLES=glibc.malloc.tcache_max=many"), Some(u64::MAX));
        assert_eq!(raised_in(b"NOT_GLIBC_TUNABLES=glibc.malloc.tcache_max=65536"), None);
        assert_eq!(raised_in(b""), None);
    }
}
