//! Frames that were named while their process ran, because what named them may be gone at the end: those of managed runtimes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::bpf::{FRAME_KIND_BIT, FrameKind};
use crate::frame::Frame;

/// Maximum number of names kept, about 300 bytes each; further ones share one.
pub const NAMED_MAX: usize = 1 << 18;

/// Name of frames beyond the limit.
const BEYOND: &str = "[managed frames beyond the limit]";

/// The named frames of a process, by the number in their frame word. Names are only added: a forked child shares its parent's.
#[derive(Debug, Default)]
pub struct NamedFrames(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    frames: Vec<Arc<[Frame]>>,
    numbers: HashMap<Arc<[Frame]>, u64>,
}

impl NamedFrames {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The frame word of these frames, innermost first; equal frames have the same.
    pub fn add(&self, frames: Vec<Frame>) -> u64 {
        let mut table = self.lock();
        let frames = if table.frames.len() < NAMED_MAX { frames } else { vec![Frame::named(BEYOND)] };
        let kind = (FrameKind::Named as u64) << FRAME_KIND_BIT;
        if let Some(number) = table.numbers.get(frames.as_slice()) {
            return kind | number;
        }
        let number = table.frames.len() as u64;
        let frames: Arc<[Frame]> = frames.into();
        table.frames.push(Arc::clone(&frames));
        table.numbers.insert(frames, number);
        kind | number
    }

    /// The frames of a word; `None` if it is not one of these.
    pub fn get(&self, word: u64) -> Option<Arc<[Frame]>> {
        if word >> FRAME_KIND_BIT != FrameKind::Named as u64 {
            return None;
        }
        let number = usize::try_from(word & ((1 << FRAME_KIND_BIT) - 1)).ok()?;
        self.lock().frames.get(number).cloned()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn equal_frames_have_one_word_and_every_word_its_frames() {
        let names = NamedFrames::default();
        let [a, b, again] = ["a", "b", "a"].map(|name| names.add(vec![Frame::named(name)]));
        assert_eq!((a, a != b), (again, true));
        assert_eq!(&*names.get(b).unwrap()[0].function, "b");
        assert!(names.get(b + 1).is_none() && names.get(7).is_none());
    }
}
