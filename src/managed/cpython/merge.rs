//! Python frames in their places among the native frames.

use crate::bpf::{self, FRAME_ADDRESS_MASK, FRAME_KIND_BIT, FrameKind, PYTHON_OUTERMOST, PYTHON_OUTSIDE, PYTHON_UNKNOWN};

/// The native frame whose place a call's Python frames take: its index, or the number of native frames if it is beyond them.
fn place_of(native: u16, words: &[u64], past: usize, is_loop: impl Fn(u64) -> bool) -> usize {
    match u32::from(native) {
        PYTHON_OUTSIDE => words.len(),
        PYTHON_UNKNOWN => {
            let found = words.iter().skip(past).position(|&word| is_native(word) && is_loop(word & FRAME_ADDRESS_MASK));
            found.map_or(words.len(), |at| past + at)
        }
        // What a hostile process says stays within the stack.
        native => (native as usize).max(past).min(words.len()),
    }
}

fn is_native(word: u64) -> bool {
    word >> FRAME_KIND_BIT == FrameKind::Native as u64
}

/// Native frames with the Python frames of each call of the evaluation loop in place of its own frame, or, if that is kept, inside it. `is_loop`: whether an address is in the
/// loop; `name`: the word of a frame; `rest`: the word that stands for the Python frames that are missing at the end, if some are.
pub fn merged(
    words: &[u64],
    frames: &[bpf::PythonFrame],
    keeps_loop: bool,
    is_loop: impl Fn(u64) -> bool,
    mut name: impl FnMut(&bpf::PythonFrame) -> u64,
    rest: Option<u64>,
) -> Vec<u64> {
    let mut merged = Vec::with_capacity(words.len() + frames.len() + 1);
    // The native frames before `next` are done; no other call has its place before `past`.
    let (mut next, mut past) = (0, 0);
    let outermost = |frame: &bpf::PythonFrame| u32::from(frame.flags) & PYTHON_OUTERMOST != 0;
    let mut calls: Vec<&[bpf::PythonFrame]> = frames.split_inclusive(outermost).collect();
    let native = |call: &&[bpf::PythonFrame]| call.last().map_or(PYTHON_UNKNOWN, |last| u32::from(last.native));
    if calls.iter().all(|call| native(call) != PYTHON_UNKNOWN) {
        // A thread that runs in several interpreters has a list in each.
        calls.sort_by_key(native);
    }
    for call in calls {
        let Some(last) = call.last() else { continue };
        let place = place_of(last.native, words, past, &is_loop);
        merged.extend(words.get(next..place).unwrap_or_default());
        merged.extend(call.iter().map(&mut name));
        if !outermost(last) {
            merged.extend(rest);
        }
        next = if keeps_loop { place } else { (place + 1).min(words.len()) };
        past = place + 1;
    }
    if let Some(rest) = rest.filter(|_| frames.last().is_none_or(outermost)) {
        let place = place_of(PYTHON_UNKNOWN as u16, words, past, &is_loop);
        merged.extend(words.get(next..place).unwrap_or_default());
        merged.push(rest);
        next = if keeps_loop { place } else { (place + 1).min(words.len()) };
    }
    merged.extend(words.get(next..).unwrap_or_default());
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOOP: u64 = 0x5000;

    fn frame(code: u64, native: u32) -> bpf::PythonFrame {
        bpf::PythonFrame { code, instruction: 0, native: native as u16, flags: PYTHON_OUTERMOST as u16 }
    }

    fn inner(code: u64) -> bpf::PythonFrame {
        bpf::PythonFrame { flags: 0, ..frame(code, PYTHON_UNKNOWN) }
    }

    fn merge(words: &[u64], frames: &[bpf::PythonFrame], rest: Option<u64>) -> Vec<u64> {
        merged(words, frames, false, |address| address & !0xff == LOOP, |frame| frame.code, rest)
    }

    #[test]
    fn each_call_of_the_loop_is_replaced_by_its_frames() {
        let words = [1, LOOP, 2, LOOP + 1, 3];
        assert_eq!(merge(&words, &[inner(10), frame(11, 1), frame(12, 3)], None), [1, 10, 11, 2, 12, 3]);
        // By turns where the places are not known.
        assert_eq!(merge(&words, &[frame(11, PYTHON_UNKNOWN), frame(12, PYTHON_UNKNOWN)], None), [1, 11, 2, 12, 3]);
    }

    #[test]
    fn the_loop_can_be_kept() {
        let words = [1, LOOP, 2, LOOP + 1, 3];
        let frames = [inner(10), frame(11, PYTHON_UNKNOWN), frame(12, PYTHON_UNKNOWN)];
        let kept = merged(&words, &frames, true, |address| address & !0xff == LOOP, |frame| frame.code, None);
        assert_eq!(kept, [1, 10, 11, LOOP, 2, 12, LOOP + 1, 3]);
    }

    #[test]
    fn frames_beyond_a_cut_stack_follow_it() {
        assert_eq!(merge(&[1, LOOP, 2], &[frame(11, 1), frame(12, PYTHON_OUTSIDE), frame(13, PYTHON_OUTSIDE)], None), [1, 11, 2, 12, 13]);
    }

    #[test]
    fn what_is_missing_is_said_where_it_is_missing() {
        let words = [1, LOOP, 2, LOOP + 1, 3];
        assert_eq!(merge(&words, &[frame(11, 1), inner(12), inner(13)], Some(99)), [1, 11, 2, 12, 13, 99, 3]);
        assert_eq!(merge(&words, &[frame(11, 1)], Some(99)), [1, 11, 2, 99, 3]);
        assert_eq!(merge(&words, &[], Some(99)), [1, 99, 2, LOOP + 1, 3]);
    }

    #[test]
    fn a_loop_whose_frames_are_not_known_stays() {
        assert_eq!(merge(&[1, LOOP, 2, LOOP + 1, 3], &[frame(12, 3)], None), [1, LOOP, 2, 12, 3]);
    }

    #[test]
    fn forged_places_lose_no_native_frame_outside_the_loop_but_one() {
        let words = [1, 2, 3];
        assert_eq!(merge(&words, &[frame(11, 2), frame(12, 0), frame(13, 60_000)], None), [12, 2, 11, 13]);
        assert_eq!(merge(&words, &[frame(11, 2), frame(12, 2), frame(13, PYTHON_UNKNOWN)], None), [1, 2, 11, 12, 13]);
    }

    #[test]
    fn calls_of_several_interpreters_are_sorted() {
        let words = [1, LOOP, 2, LOOP + 1, 3, LOOP + 2, 4];
        assert_eq!(merge(&words, &[frame(12, 3), frame(11, 1), frame(13, 5)], None), [1, 11, 2, 12, 3, 13, 4]);
    }
}
