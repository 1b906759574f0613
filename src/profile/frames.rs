//! The frames of one side alone: native code, or the code of managed runtimes.

use std::collections::HashMap;
use std::sync::Arc;

use super::model::{FrameId, Profile};
use crate::frame::Frame;

/// Name of the frame that stands for a stack without frames of the side that is shown.
pub const OTHER_SIDE: &str = "[native]";
/// The same where native frames are shown.
pub const MANAGED_SIDE: &str = "[managed]";

/// Which frames of a stack are shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FrameFilter {
    /// All.
    #[default]
    All,
    /// Native code.
    Native,
    /// Code of managed runtimes.
    Managed,
}

impl FrameFilter {
    /// Whether a frame is shown.
    #[must_use]
    pub fn shows(self, frame: &Frame) -> bool {
        match self {
            Self::All => true,
            Self::Native => !frame.kind().is_managed(),
            Self::Managed => frame.kind().is_managed(),
        }
    }

    /// The frames of a stack that are shown; one that says which were left out if there are none.
    #[must_use]
    pub fn of_stack(self, frames: Vec<Frame>) -> Vec<Frame> {
        if self == Self::All {
            return frames;
        }
        let shown: Vec<Frame> = frames.into_iter().filter(|frame| self.shows(frame)).collect();
        if shown.is_empty() { vec![self.left_out()] } else { shown }
    }

    fn left_out(self) -> Frame {
        Frame::named(if self == Self::Native { MANAGED_SIDE } else { OTHER_SIDE })
    }
}

impl Profile {
    /// The profile with the frames of one side alone: stacks that differ only in the others are one. What is no stack stays as it is.
    #[must_use]
    pub fn with_frames(self, filter: FrameFilter) -> Self {
        if filter == FrameFilter::All {
            return self;
        }
        let mut filtered = Self::new(self.meta.clone());
        let mut ids: HashMap<FrameId, FrameId> = HashMap::new();
        for stack in self.stacks() {
            let keeps_all = self.is_rest(stack);
            let shown = stack.frames.iter().filter(|&&id| keeps_all || filter.shows(self.frame(id)));
            let mut frames: Vec<FrameId> = shown.map(|&id| *ids.entry(id).or_insert_with(|| filtered.intern(self.frame(id)))).collect();
            if frames.is_empty() {
                frames.push(filtered.intern(&filter.left_out()));
            }
            let truncated = stack.truncated.as_ref().map(Arc::clone);
            filtered.add_ids_estimate(stack.pid, frames.into(), truncated, &stack.values, &stack.errors);
        }
        filtered
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::frame::MODULE_JAVA_COMPILED;
    use crate::profile::{UNATTRIBUTED, ValueKind, Values};

    fn profile() -> Profile {
        let native = |name: &str| Frame::named(name);
        let java = |name: &str| Frame { module: MODULE_JAVA_COMPILED.into(), ..Frame::named(name) };
        let mut profile = Profile::default();
        let mut add = |frames: &[Frame], bytes| profile.add(7, frames, None, &Values::default().with(ValueKind::InuseSpace, bytes));
        add(&[native("malloc"), java("A.a"), native("call"), native("start")], 1);
        add(&[native("calloc"), java("A.a"), native("call"), native("start")], 2);
        add(&[native("malloc"), native("compile")], 4);
        add(&[], 8);
        profile
    }

    fn shown(filter: FrameFilter) -> Vec<(String, u64)> {
        let profile = profile().with_frames(filter);
        let names = |stack| profile.frames_of(stack).map(|frame| &*frame.function).collect::<Vec<_>>().join(" ");
        profile.stacks().iter().map(|stack| (names(stack), stack.values.get(ValueKind::InuseSpace))).collect()
    }

    #[test]
    fn stacks_of_one_side_are_added_up_and_nothing_is_lost() {
        let managed = [("A.a", 3), (OTHER_SIDE, 4), (UNATTRIBUTED, 8)].map(|(name, bytes)| (name.to_owned(), bytes));
        assert_eq!(shown(FrameFilter::Managed), managed);
        let native = [("malloc call start", 1), ("calloc call start", 2), ("malloc compile", 4), (UNATTRIBUTED, 8)];
        assert_eq!(shown(FrameFilter::Native), native.map(|(name, bytes)| (name.to_owned(), bytes)));
        assert_eq!(shown(FrameFilter::All).len(), 4);
    }
}
