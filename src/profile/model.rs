//! The profile: interned frames, interned stacks of them, and the values of each stack.

use std::collections::HashMap;
use std::sync::Arc;

use super::kind::{StandardErrors, ValueKind, Values};
use super::meta::{Metadata, Mode, Process};
use crate::frame::Frame;

/// Name of the frame for bytes without a known stack.
pub const UNATTRIBUTED: &str = "[unattributed]";

/// Name of the frame for what was allocated before the recording began.
pub const BEFORE_ATTACH: &str = "[before attach]";

/// Index of a frame in its [`Profile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameId(u32);

/// One call stack of one process, with its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Process id, 0 = not known.
    pub pid: u32,
    /// Frames, leaf first.
    pub frames: Arc<[FrameId]>,
    /// Why the walk ended before the thread's entry. `None` = it did not, or this is not known.
    pub truncated: Option<Arc<str>>,
    /// The values.
    pub values: Values,
    /// Their standard errors: all 0 unless the profile's mode estimates.
    pub errors: StandardErrors,
}

#[derive(PartialEq, Eq, Hash)]
struct StackKey {
    pid: u32,
    frames: Arc<[FrameId]>,
    truncated: Option<Arc<str>>,
}

/// The model that every recording produces and every surface reads.
#[derive(Default)]
pub struct Profile {
    /// The metadata.
    pub meta: Metadata,
    frames: Vec<Frame>,
    frame_ids: HashMap<Frame, FrameId>,
    stacks: Vec<Stack>,
    stack_indices: HashMap<StackKey, usize>,
}

/// Programs seldom allocate smaller blocks.
const SMALL_BLOCK_BYTES: f64 = 16.0;

impl Profile {
    /// An empty profile.
    pub fn new(meta: Metadata) -> Self {
        Self { meta, ..Self::default() }
    }

    /// Adds values to a stack, which is created if it is new. `frames` is leaf first; an empty one means [`UNATTRIBUTED`].
    ///
    /// `truncated` says why the walk ended early, and distinguishes stacks that look the same only because a walk was cut short.
    pub fn add(&mut self, pid: u32, frames: &[Frame], truncated: Option<&str>, values: &Values) {
        self.add_estimate(pid, frames, truncated, values, &StandardErrors::default());
    }

    /// Like [`add`](Self::add), for values that are estimates with these standard errors.
    pub fn add_estimate(&mut self, pid: u32, frames: &[Frame], truncated: Option<&str>, values: &Values, errors: &StandardErrors) {
        let ids: Vec<FrameId> = if frames.is_empty() {
            vec![self.intern(&Frame::named(UNATTRIBUTED))]
        } else {
            frames.iter().map(|frame| self.intern(frame)).collect()
        };
        self.add_ids_estimate(pid, ids.into(), truncated.map(Arc::from), values, errors);
    }

    /// Like [`add`](Self::add), with frames already interned in this profile, for callers that add the same frame to many stacks.
    pub fn add_ids(&mut self, pid: u32, frames: Arc<[FrameId]>, truncated: Option<Arc<str>>, values: &Values) {
        self.add_ids_estimate(pid, frames, truncated, values, &StandardErrors::default());
    }

    /// Like [`add_ids`](Self::add_ids), for values that are estimates with these standard errors.
    pub fn add_ids_estimate(
        &mut self,
        pid: u32,
        frames: Arc<[FrameId]>,
        truncated: Option<Arc<str>>,
        values: &Values,
        errors: &StandardErrors,
    ) {
        let key = StackKey { pid, frames: frames.clone(), truncated: truncated.clone() };
        let next = self.stacks.len();
        let index = *self.stack_indices.entry(key).or_insert(next);
        match self.stacks.get_mut(index) {
            Some(stack) => {
                stack.values.add(values);
                stack.errors.add(errors);
            }
            None => self.stacks.push(Stack { pid, frames, truncated, values: *values, errors: *errors }),
        }
    }

    /// The id of a frame, the same for equal frames.
    pub fn intern(&mut self, frame: &Frame) -> FrameId {
        if let Some(&id) = self.frame_ids.get(frame) {
            return id;
        }
        let id = FrameId(u32::try_from(self.frames.len()).unwrap_or(u32::MAX));
        self.frames.push(frame.clone());
        self.frame_ids.insert(frame.clone(), id);
        id
    }

    /// The stacks, in the order they were added.
    pub fn stacks(&self) -> &[Stack] {
        &self.stacks
    }

    /// The frames, in the order they were added; a [`FrameId`] is an index into them.
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The frame of an id of this profile.
    ///
    /// # Panics
    /// If the id is of another profile.
    pub fn frame(&self, id: FrameId) -> &Frame {
        &self.frames[id.0 as usize]
    }

    /// The frames of a stack of this profile, leaf first.
    pub fn frames_of<'a>(&'a self, stack: &'a Stack) -> impl DoubleEndedIterator<Item = &'a Frame> + ExactSizeIterator {
        stack.frames.iter().map(|&id| self.frame(id))
    }

    /// Whether a known stack has a value of the kind, and not only [`UNATTRIBUTED`] or [`BEFORE_ATTACH`].
    pub fn has_stacks_of(&self, kind: ValueKind) -> bool {
        self.stacks.iter().any(|stack| stack.values.get(kind) > 0 && !self.is_rest(stack))
    }

    /// Whether a row is not a stack but a remainder: [`UNATTRIBUTED`] or [`BEFORE_ATTACH`].
    pub fn is_rest(&self, stack: &Stack) -> bool {
        self.rest_of(stack).is_some()
    }

    /// The remainder to which a row belongs: [`UNATTRIBUTED`] or [`BEFORE_ATTACH`], its outermost frame. With `--owners` the frames before
    /// it name type, owner and root.
    pub fn rest_of(&self, stack: &Stack) -> Option<&'static str> {
        let last = self.frame(*stack.frames.last()?);
        [UNATTRIBUTED, BEFORE_ATTACH].into_iter().find(|name| *name == &*last.function)
    }

    /// The default kind: the first of bytes in use, live, surviving and allocated for which a stack has a value.
    pub fn leading_kind(&self) -> ValueKind {
        const ORDER: [ValueKind; 7] = [
            ValueKind::InuseSpace,
            ValueKind::LiveSpace,
            ValueKind::LargeSpace,
            ValueKind::ConfirmedSpace,
            ValueKind::SurvivorSpace,
            ValueKind::AllocSpace,
            ValueKind::UnreachedSpace,
        ];
        ORDER.into_iter().find(|kind| self.meta.kinds.contains(*kind) && self.has_stacks_of(*kind)).unwrap_or(ValueKind::InuseSpace)
    }

    /// Sums over the stacks. The peak is that of the metadata if known; the stacks need not add up to it.
    pub fn totals(&self) -> Values {
        let mut totals = Values::default();
        for stack in &self.stacks {
            totals.add(&stack.values);
        }
        if let Some(peak) = self.meta.peak_inuse_bytes() {
            totals.set(ValueKind::PeakSpace, peak);
        }
        totals
    }

    /// Whether a value of a process's stacks is only a lower bound.
    pub fn is_lower_bound(&self, pid: u32, kind: ValueKind) -> bool {
        kind.is_rate() && self.meta.governed.iter().any(|governed| governed.pid == pid && governed.rates_are_lower_bounds)
    }

    /// Whether the sum over the stacks is only a lower bound, because a part of it is.
    pub fn total_is_lower_bound(&self, kind: ValueKind) -> bool {
        kind.is_rate() && self.meta.governed.iter().any(|governed| governed.rates_are_lower_bounds)
    }

    /// The standard errors of the sums over the stacks. The remainder of a known total has the same error as its parts, with the opposite
    /// sign: in the sum both cancel, unless the parts exceeded the total and there is no remainder.
    pub fn total_errors(&self) -> StandardErrors {
        let is_rest = |stack: &Stack| self.meta.mode == Mode::Sampled && self.is_rest(stack);
        let mut errors = StandardErrors::default();
        for kind in ValueKind::ALL {
            let of_processes = self.meta.governed.iter().filter_map(|governed| governed.total_stderr.get(kind.name()));
            if let Some(variance) = of_processes.map(|error| (*error as f64).powi(2)).reduce(|sum, more| sum + more) {
                errors.set(kind, variance.sqrt().round() as u64);
                continue;
            }
            let mut variance = 0.0;
            for stack in &self.stacks {
                let error = stack.errors.get(kind) as f64;
                match (is_rest(stack), stack.values.get(kind)) {
                    (false, _) => variance += error * error,
                    (true, 1..) => variance -= error * error,
                    (true, 0) => {}
                }
            }
            errors.set(kind, (variance.max(0.0) + self.unseen_variance(kind)).sqrt().round() as u64);
        }
        errors
    }

    /// Additional variance of a sum of samples, for small counts: an interval of ±1.96 standard errors around a Poisson count n covers the
    /// true value in 94 of 100 cases or more if 3 is added to its variance n, and 0 ± 0 is not an answer. Unseen allocations may have been
    /// many small blocks. Not for totals that a census knows.
    fn unseen_variance(&self, kind: ValueKind) -> f64 {
        let block_bytes = match kind {
            _ if self.meta.mode != Mode::Sampled => return 0.0,
            ValueKind::InuseSpace | ValueKind::AllocSpace => 1.0,
            ValueKind::InuseObjects | ValueKind::AllocObjects => SMALL_BLOCK_BYTES,
            _ => return 0.0,
        };
        let mean = |process: &Process| process.longest_sample_bytes.or(process.sample_bytes).map_or(0.0, |bytes| bytes as f64);
        self.meta.processes.iter().map(|process| 3.0 * (mean(process) / block_bytes).powi(2)).sum()
    }

    /// The stacks with a value of the kind, in the order of their [rank](Values::rank); equal ones in the order of their frames'
    /// names, so that output is stable.
    pub fn ranked(&self, kind: ValueKind) -> Vec<&Stack> {
        let mut ranked: Vec<&Stack> = self.stacks.iter().filter(|stack| stack.values.get(kind) > 0).collect();
        ranked.sort_by(|a, b| {
            let names = |stack| self.frames_of(stack).map(|frame| &frame.function);
            b.values.rank(kind).cmp(&a.values.rank(kind)).then_with(|| names(a).cmp(names(b))).then(a.pid.cmp(&b.pid))
        });
        ranked
    }
}

/// Abbreviated: a profile may have a million stacks.
impl std::fmt::Debug for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Profile").field("mode", &self.meta.mode).field("stacks", &self.stacks.len()).finish_non_exhaustive()
    }
}

impl FrameId {
    /// Index into [`Profile::frames`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}
