//! The state of the live view, and what each key does to it. Pure.

use std::collections::HashMap;
use std::sync::Arc;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::filter::type_into;
use super::keys;
use super::sample::{ProcessSample, Sample, SortKey, StackKey, StackSample, rank};

/// The active view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The table of stacks.
    #[default]
    Stacks,
    /// One stack in full.
    Stack,
    /// The filter is being edited.
    Filter,
    /// The list of keys.
    Help,
}

/// Whether to continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Then {
    /// Continue.
    Go,
    /// Quit.
    Quit,
}

/// The state of the live view.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// The active view.
    pub mode: Mode,
    /// Pid of the process shown; `None` = the first.
    pub pid: Option<u32>,
    /// The value by which stacks are ranked.
    pub sort: SortKey,
    /// Show only stacks that have a frame with this text, ignoring case.
    pub filter: String,
    /// The selected stack; `None` = the first row.
    pub selected: Option<StackKey>,
    /// First line shown of a stack in full.
    pub scroll: usize,
    /// All processes have ended: the next key quits.
    pub over: bool,
}

/// The keys, and what they do.
pub const KEYS: [(&str, &str); 11] = [
    ("↑ ↓ j k", "select a stack"),
    ("PgUp PgDn g G", "ten up or down, first, last"),
    ("Enter", "the stack in full; again to go back"),
    ("s", "sort by the next column"),
    ("l n b a w", "sort by live bytes, live blocks, bytes/s, allocations/s, growth"),
    ("/", "show only stacks with a frame that contains a text"),
    ("Tab  Shift-Tab", "next or previous process"),
    ("?", "these keys"),
    ("Esc", "back; from the table: quit"),
    ("q  Ctrl-C", "quit"),
    ("", "live: allocated since attach, not freed; growth: the heap grew although it had space"),
];

impl State {
    /// The process shown.
    pub fn process<'a>(&self, sample: &'a Sample) -> Option<&'a ProcessSample> {
        let chosen = sample.processes.iter().find(|process| Some(process.pid) == self.pid);
        chosen.or_else(|| sample.processes.first())
    }

    /// The rows of the table of stacks, in order.
    pub fn rows<'a>(&self, process: &'a ProcessSample) -> Vec<&'a StackSample> {
        let mut rows: Vec<&StackSample> = process.stacks.iter().collect();
        if !self.filter.is_empty() {
            // Frames share their texts, so each is compared once.
            let mut known: HashMap<*const u8, bool> = HashMap::new();
            let mut has = |text: &Arc<str>| *known.entry(text.as_ptr()).or_insert_with(|| contains(text, &self.filter));
            rows.retain(|row| row.named.frames.iter().any(|frame| has(&frame.function) || has(&frame.file) || has(&frame.module)));
        }
        rank(&mut rows, self.sort);
        rows
    }

    /// Index of the selected row.
    pub fn selected_row(&self, rows: &[&StackSample]) -> usize {
        rows.iter().position(|row| Some(row.key) == self.selected).unwrap_or(0)
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent, sample: Option<&Sample>) -> Then {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if self.over || control && matches!(key.code, KeyCode::Char('c' | 'd')) {
            return Then::Quit;
        }
        if control || key.modifiers.contains(KeyModifiers::ALT) {
            return Then::Go;
        }
        match self.mode {
            Mode::Filter => {
                if type_into(&mut self.filter, key.code) {
                    self.mode = Mode::Stacks;
                }
            }
            Mode::Help => match key.code {
                KeyCode::Char('q') => return Then::Quit,
                _ => self.mode = Mode::Stacks,
            },
            Mode::Stack => return self.stack_key(key.code),
            Mode::Stacks => return self.stacks_key(key.code, sample),
        }
        Then::Go
    }

    fn stack_key(&mut self, code: KeyCode) -> Then {
        if let Some(rows) = keys::rows(code) {
            // Scrolling is not limited here, but when drawing.
            self.scroll = if rows == isize::MAX { self.scroll } else { self.scroll.saturating_add_signed(rows) };
            return Then::Go;
        }
        match code {
            KeyCode::Char('q') => return Then::Quit,
            KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace => self.mode = Mode::Stacks,
            KeyCode::Char('?') => self.mode = Mode::Help,
            _ => {}
        }
        Then::Go
    }

    fn stacks_key(&mut self, code: KeyCode, sample: Option<&Sample>) -> Then {
        if let Some(rows) = keys::rows(code) {
            self.go(sample, rows);
            return Then::Go;
        }
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return Then::Quit,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('s') => self.sort = self.sort.next(),
            KeyCode::Char('l') => self.sort = SortKey::Live,
            KeyCode::Char('n') => self.sort = SortKey::Count,
            KeyCode::Char('b') => self.sort = SortKey::BytesPerSecond,
            KeyCode::Char('a') => self.sort = SortKey::AllocationsPerSecond,
            KeyCode::Char('w') => self.sort = SortKey::Growth,
            KeyCode::Tab => self.turn(sample, 1),
            KeyCode::BackTab => self.turn(sample, -1),
            KeyCode::Enter => {
                // Selects the first row if none was selected, so that a new order does not change the selected stack.
                self.go(sample, 0);
                self.scroll = 0;
                self.mode = Mode::Stack;
            }
            _ => {}
        }
        Then::Go
    }

    fn go(&mut self, sample: Option<&Sample>, by: isize) {
        let Some(process) = sample.and_then(|sample| self.process(sample)) else { return };
        let rows = self.rows(process);
        let at = self.selected_row(&rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
        self.selected = rows.get(at).map(|row| row.key);
    }

    fn turn(&mut self, sample: Option<&Sample>, by: isize) {
        let Some(sample) = sample else { return };
        let count = sample.processes.len();
        let Some(pid) = self.process(sample).map(|process| process.pid) else { return };
        let at = sample.processes.iter().position(|process| process.pid == pid).unwrap_or(0);
        // One forward, or all but one, which is one back.
        let next = if by < 0 { at + count - 1 } else { at + 1 } % count.max(1);
        self.pid = sample.processes.get(next).map(|process| process.pid);
        self.selected = None;
    }
}

/// Whether a text contains another, ignoring ASCII case.
pub fn contains(text: &str, part: &str) -> bool {
    part.is_empty() || text.as_bytes().windows(part.len()).any(|window| window.eq_ignore_ascii_case(part.as_bytes()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::tui::testing::shop;

    fn press(state: &mut State, sample: &Sample, keys: &str) -> Then {
        let mut then = Then::Go;
        for c in keys.chars() {
            let code = match c {
                '⏎' => KeyCode::Enter,
                '⎋' => KeyCode::Esc,
                '⌫' => KeyCode::Backspace,
                '⇥' => KeyCode::Tab,
                '⇤' => KeyCode::BackTab,
                '↓' => KeyCode::Down,
                c => KeyCode::Char(c),
            };
            then = state.key(KeyEvent::new(code, KeyModifiers::NONE), Some(sample));
        }
        then
    }

    fn shown(state: &State, sample: &Sample) -> Vec<String> {
        let rows = state.rows(state.process(sample).unwrap());
        rows.iter().map(|row| row.named.title().unwrap().function.to_string()).collect()
    }

    fn selected(state: &State, sample: &Sample) -> String {
        let rows = state.rows(state.process(sample).unwrap());
        rows[state.selected_row(&rows)].named.title().unwrap().function.to_string()
    }

    #[test]
    fn each_sort_key_puts_its_largest_stack_first() {
        let (mut state, sample) = (State::default(), shop());
        assert_eq!(shown(&state, &sample)[0], "shop::create(int)");
        for (key, first) in [
            ("a", "parse\u{1b}[31m"),
            ("l", "shop::create(int)"),
            ("b", "parse\u{1b}[31m"),
            ("n", "shop::create(int)"),
            ("w", "parse\u{1b}[31m"),
        ] {
            press(&mut state, &sample, key);
            assert_eq!(shown(&state, &sample)[0], first, "{key}");
        }
        press(&mut state, &sample, "s");
        assert_eq!(state.sort, SortKey::Live);
    }

    #[test]
    fn a_filter_keeps_stacks_with_a_matching_frame_in_any_case() {
        let (mut state, sample) = (State::default(), shop());
        press(&mut state, &sample, "/PARSe.C⏎");
        assert_eq!(shown(&state, &sample), ["parse\u{1b}[31m"]);
        press(&mut state, &sample, "/zzz");
        assert!(shown(&state, &sample).is_empty());
        // A table without rows accepts every key.
        assert_eq!(press(&mut state, &sample, "⏎↓jkG⏎⏎"), Then::Go);
        press(&mut state, &sample, "/⎋");
        assert_eq!(shown(&state, &sample).len(), 3);
    }

    #[test]
    fn letters_typed_into_a_filter_are_no_commands() {
        let (mut state, sample) = (State::default(), shop());
        assert_eq!(press(&mut state, &sample, "/qs⌫"), Then::Go);
        assert_eq!((state.filter.as_str(), state.sort), ("q", SortKey::Live));
    }

    #[test]
    fn the_selection_follows_its_stack_when_the_order_changes() {
        let (mut state, mut sample) = (State::default(), shop());
        press(&mut state, &sample, "j");
        assert_eq!(selected(&state, &sample), "parse\u{1b}[31m");
        sample.processes[0].stacks[1].numbers.inuse_bytes = 1 << 40;
        assert_eq!(shown(&state, &sample)[0], "parse\u{1b}[31m");
        assert_eq!(selected(&state, &sample), "parse\u{1b}[31m");
        press(&mut state, &sample, "G");
        assert_eq!(selected(&state, &sample), "init");
        press(&mut state, &sample, "↓↓k");
        assert_eq!(selected(&state, &sample), "shop::create(int)");
    }

    #[test]
    fn escape_goes_back_and_from_the_table_out() {
        let (mut state, sample) = (State::default(), shop());
        for opened in ["⏎", "?", "/"] {
            press(&mut state, &sample, opened);
            assert_ne!(state.mode, Mode::Stacks);
            assert_eq!(press(&mut state, &sample, "⎋"), Then::Go);
            assert_eq!(state.mode, Mode::Stacks);
        }
        assert_eq!(press(&mut state, &sample, "⎋"), Then::Quit);
    }

    #[test]
    fn control_c_quits_from_everywhere() {
        let sample = shop();
        for opened in ["", "⏎", "?", "/abc"] {
            let mut state = State::default();
            press(&mut state, &sample, opened);
            assert_eq!(state.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(&sample)), Then::Quit);
        }
        assert_eq!(State::default().key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL), None), Then::Quit);
    }

    #[test]
    fn tab_goes_through_the_processes_in_a_circle() {
        let (mut state, sample) = (State::default(), shop());
        let pid = |state: &State| state.process(&sample).unwrap().pid;
        let mut pids = vec![pid(&state)];
        for key in ["⇥", "⇥", "⇤", "⇤"] {
            press(&mut state, &sample, key);
            pids.push(pid(&state));
        }
        assert_eq!(pids, [4242, 4243, 4242, 4243, 4242]);
    }

    #[test]
    fn when_all_is_over_any_key_leaves() {
        let mut state = State { over: true, ..State::default() };
        assert_eq!(press(&mut state, &shop(), "x"), Then::Quit);
    }
}
