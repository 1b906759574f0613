//! A process that can be fully traced within its budget.

use crate::capture::{Attached, Hits, TargetLoss};
use crate::governor::{HitCosts, Tier, WindowCost, WindowTimes};
use crate::session::monotonic_ns;
use crate::session::report::heap::{self, Before};
use crate::session::tier::windows::spent::{inside, spent};
use crate::session::tier::windows::state::{ProcessState, lock};
use crate::session::tier::windows::target::{State, Target, Tools, is_lossy};

/// Length of the pieces in which a full trace's cost is accounted, in seconds.
pub(super) const PIECE_S: f64 = 1.0;
/// Length of the pieces from which a full trace is estimated: six times the greatest age.
const ESTIMATE_PIECE_NS: u64 = 60_000_000_000;

/// A full trace.
pub(super) struct Full {
    pub(super) attached: Attached,
    /// When it began, in seconds of the driver's clock.
    pub(super) since_s: f64,
    pub(super) piece_s: f64,
    /// The same moment by CLOCK_MONOTONIC: attaching and waiting for a CPU may come between it and the driver's current time.
    pub(super) piece_ns: u64,
    pub(super) hits: Hits,
    pub(super) loss: TargetLoss,
    pub(super) estimate_ns: u64,
    /// Recordings of every call that had begun before it.
    pub(super) recordings: u64,
}

impl Target {
    pub(super) fn begin_full(&mut self, tools: &Tools<'_>) {
        let recordings = tools.capture.recordings_begun(self.pid());
        let Some(attached) = self.attach(tools) else { return };
        let now_ns = monotonic_ns();
        if let Some(state) = lock(tools.states).of.get_mut(&self.slot.index) {
            state.open(now_ns, u64::MAX);
            state.live = Some(crate::ledger::Ledger::new(now_ns, crate::ledger::StackLimits::default()));
        }
        tools.capture.contents(self.slot, false);
        if !tools.capture.open(self.pid(), self.slot, self.pace.full_quota(), u64::MAX) {
            self.make_way_with(tools, attached, tools.capture.hits(self.slot));
            return;
        }
        self.full_since_s = Some(tools.now_s - self.began_s);
        let (hits, loss) = (tools.capture.hits(self.slot), tools.capture.loss(self.slot));
        self.state = State::Full(Full {
            attached,
            since_s: tools.now_s,
            piece_s: tools.now_s,
            piece_ns: monotonic_ns(),
            hits,
            loss,
            estimate_ns: now_ns,
            recordings,
        });
    }

    pub(super) fn while_full(&mut self, tools: &Tools<'_>, mut full: Full) {
        let hits = tools.capture.hits(self.slot);
        let over = hits.closed_ns.is_some();
        if !over && tools.now_s < full.piece_s + PIECE_S {
            self.state = State::Full(full);
            return;
        }
        self.look_at_limits(tools.capture);
        // The quota's hits are divided by the time until it was closed; hits between that and its detection are skipped cheaply.
        let end_ns = hits.closed_ns.unwrap_or_else(monotonic_ns);
        let inside = inside(full.hits, hits);
        let around = spent(hits).since(spent(full.hits)).since(inside);
        let lost_s = tools.costs.spent_s(inside);
        self.pace.learn(inside.hits(), lost_s);
        self.pace.spent(WindowCost {
            lost_s,
            around_s: tools.costs.passed_over_s(around),
            open_s: end_ns.saturating_sub(full.piece_ns) as f64 / 1e9,
            tier: Tier::Full,
        });
        let lossy = is_lossy(tools.capture.loss(self.slot), full.loss);
        if over || lossy {
            self.pace.leave_full();
        }
        if self.pace.tier() == Tier::Windows {
            self.end_full(tools, full, hits.closed_ns, lossy);
            return;
        }
        if full.recordings != tools.capture.recordings_begun(self.pid())
            || !tools.capture.open(self.pid(), self.slot, self.pace.full_quota(), u64::MAX)
        {
            self.make_way_with(tools, full.attached, hits);
            return;
        }
        (full.piece_s, full.piece_ns) = (tools.now_s, monotonic_ns());
        full.hits = hits;
        let now_ns = monotonic_ns();
        if now_ns - full.estimate_ns >= ESTIMATE_PIECE_NS {
            full.estimate_ns = now_ns;
            self.end_piece(tools, now_ns, Some(now_ns));
        }
        self.state = State::Full(full);
    }

    /// Adds what a full trace saw so far to the estimates, and begins the next piece at `next_ns`.
    pub(super) fn end_piece(&mut self, tools: &Tools<'_>, end_ns: u64, next_ns: Option<u64>) {
        let observed = lock(tools.states).of.get_mut(&self.slot.index).and_then(|state| {
            let observed = state.window.take();
            if let Some(next_ns) = next_ns {
                state.open(next_ns, u64::MAX);
            }
            observed
        });
        if let Some(observed) = observed {
            self.estimator.full(&observed.observer.close(end_ns, &HitCosts::FREE, &WindowTimes::default()));
        }
    }

    pub(super) fn end_full(&mut self, tools: &Tools<'_>, full: Full, closed_ns: Option<u64>, lossy: bool) {
        tools.capture.switch(self.slot, false);
        let end_ns = closed_ns.unwrap_or_else(monotonic_ns);
        // A short first piece that the quota ended is not a representative sample of the process's time.
        let too_short = closed_ns.is_some() && tools.now_s - full.since_s < 2.0 * PIECE_S;
        if let Some(state) = lock(tools.states).of.get_mut(&self.slot.index) {
            state.live = None;
            if lossy || too_short {
                state.window = None;
            }
        }
        if lossy {
            self.estimator.lossy();
        }
        self.end_piece(tools, end_ns, None);
        self.full_left += u64::from(!too_short);
        self.full_since_s = None;
        drop(tools.reaper.take_out(full.attached));
        self.schedule.restart(tools.now_s);
        self.tail = Some((tools.capture.hits(self.slot), tools.now_s));
        // Detaching takes a tenth of a second; a window would find the probes still attached.
        self.state = State::Idle(tools.now_s + 0.2);
    }

    /// Takes the last census of the heap; with a full trace, attributes each live chunk to a stack.
    pub fn look_at_the_heap(&mut self, state: Option<&mut ProcessState>) {
        let pid = self.pid();
        let live = state.and_then(|state| state.live.as_mut()).filter(|_| self.full_since_s.is_some());
        self.joined = live.and_then(|live| heap::joined(pid, live, self.before.as_ref().unwrap_or(&Before::Unknown)));
        self.heap_at_end = self.joined.as_ref().map(|picture| picture.summary).or_else(|| heap::ladder(pid));
    }
}
