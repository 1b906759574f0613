//! The state of the view of all processes, and what keys and the mouse do. Pure.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};

use super::Sample;
use super::cells::live_resident;
use crate::model::view::ProcessView;
use crate::tui::filter::type_into;
use crate::tui::keys;
use crate::tui::state::{Then, contains};

/// The order of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sort {
    /// Resident bytes of the process.
    #[default]
    Resident,
    /// Live bytes.
    Live,
    /// What a trim releases.
    Trimmable,
    /// Pinned bytes.
    Pinned,
    /// Fragmentation ratio.
    Fragmentation,
    /// Growth of live bytes.
    Growth,
    /// Name.
    Name,
}

impl Sort {
    /// All of them, in the order of key `s`.
    pub const ALL: [Self; 7] = [Self::Resident, Self::Live, Self::Trimmable, Self::Pinned, Self::Fragmentation, Self::Growth, Self::Name];

    /// Its name and its key.
    #[must_use]
    pub fn words(self) -> (&'static str, char) {
        match self {
            Self::Resident => ("resident", 'r'),
            Self::Live => ("live", 'l'),
            Self::Trimmable => ("trimmable", 't'),
            Self::Pinned => ("pinned", 'p'),
            Self::Fragmentation => ("fragmentation", 'f'),
            Self::Growth => ("growth", 'w'),
            Self::Name => ("name", 'n'),
        }
    }

    fn value(self, one: &ProcessView) -> f64 {
        let heap = one.ladder.as_ref();
        let bytes = |figure: Option<u64>| figure.map_or(-1.0, |bytes| bytes as f64);
        match self {
            Self::Resident => one.rss_bytes as f64,
            Self::Live => bytes(heap.and_then(live_resident)),
            Self::Trimmable => bytes(heap.and_then(|heap| heap.ladder.trimmable_bytes)),
            Self::Pinned => bytes(heap.and_then(|heap| heap.ladder.pinned_bytes)),
            Self::Fragmentation => one.fragmentation_ratio.unwrap_or(-1.0),
            Self::Growth => one.growth.map_or(f64::MIN, |growth| growth.live_bytes_per_s),
            Self::Name => 0.0,
        }
    }
}

/// The active view.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// The list.
    #[default]
    List,
    /// One process.
    Process,
    /// The filter is being edited.
    Filter,
    /// The list of keys.
    Help,
}

/// The state.
#[derive(Debug, Clone, Default)]
pub struct State {
    /// The active view.
    pub mode: Mode,
    /// Order of the list.
    pub sort: Sort,
    /// Only names, containers and verdicts with this text, or pids that begin with it.
    pub filter: String,
    /// Pid of the selected row; `None` = the first.
    pub selected: Option<u32>,
    /// Whether a process of the list can be recorded: only on this machine.
    pub can_record: bool,
    /// The process to record.
    pub record: Option<u32>,
    /// Screen row of the first process, and the pids of the rows drawn, for clicks.
    pub drawn: (u16, Vec<u32>),
}

/// The keys, and what they do.
pub const KEYS: [(&str, &str); 10] = [
    ("↑ ↓ j k  wheel", "select a process"),
    ("PgUp PgDn g G", "ten up or down, first, last"),
    ("Enter  click", "the process: ladder, verdict, address space, stacks; again to go back"),
    ("s", "sort by the next column"),
    ("r l t p f w n", "sort by resident, live, trimmable, pinned, fragmentation, growth, name"),
    ("/", "show only processes, containers, workloads or verdicts that contain a text"),
    ("e", "without an agent: record the process with its stacks, at about 2 µs per allocation"),
    ("?", "these keys"),
    ("Esc", "back; from the list: quit"),
    ("q  Ctrl-C", "quit"),
];

impl State {
    /// The rows of the list, in order.
    #[must_use]
    pub fn rows<'a>(&self, sample: &'a Sample) -> Vec<&'a ProcessView> {
        let has = |one: &ProcessView| {
            let container = one.container.as_ref().is_some_and(|container| contains(&container.title, &self.filter));
            let workload = [&one.workload.name, &one.workload.service_name].into_iter().any(|name| contains(name, &self.filter));
            let verdict = one.verdict.as_ref().is_some_and(|verdict| contains(&verdict.verdict, &self.filter));
            contains(&one.comm, &self.filter) || container || workload || verdict || one.pid.to_string().starts_with(&self.filter)
        };
        let mut rows: Vec<&ProcessView> = sample.view.processes.iter().filter(|one| self.filter.is_empty() || has(one)).collect();
        match self.sort {
            Sort::Name => rows.sort_by(|a, b| a.comm.cmp(&b.comm).then(a.pid.cmp(&b.pid))),
            sort => rows.sort_by(|a, b| sort.value(b).total_cmp(&sort.value(a)).then(a.pid.cmp(&b.pid))),
        }
        rows
    }

    /// Index of the selected row.
    #[must_use]
    pub fn selected_row(&self, rows: &[&ProcessView]) -> usize {
        rows.iter().position(|row| Some(row.pid) == self.selected).unwrap_or(0)
    }

    /// The process whose view is open.
    #[must_use]
    pub fn open(&self) -> Option<u32> {
        self.selected.filter(|_| self.mode == Mode::Process)
    }

    /// Handles a key.
    pub fn key(&mut self, key: KeyEvent, sample: &Sample) -> Then {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if matches!(key.code, KeyCode::Char('c' | 'd')) { Then::Quit } else { Then::Go };
        }
        match self.mode {
            Mode::Filter => {
                if type_into(&mut self.filter, key.code) {
                    self.mode = Mode::List;
                }
            }
            Mode::Help => self.mode = Mode::List,
            Mode::Process => match key.code {
                KeyCode::Char('q') => return Then::Quit,
                KeyCode::Esc | KeyCode::Enter | KeyCode::Backspace => self.mode = Mode::List,
                KeyCode::Char('?') => self.mode = Mode::Help,
                KeyCode::Down | KeyCode::Char('j') => self.go(sample, 1),
                KeyCode::Up | KeyCode::Char('k') => self.go(sample, -1),
                KeyCode::Char('e') => return self.record(sample),
                _ => {}
            },
            Mode::List => return self.list_key(key.code, sample),
        }
        Then::Go
    }

    fn list_key(&mut self, code: KeyCode, sample: &Sample) -> Then {
        if let Some(rows) = keys::rows(code) {
            self.go(sample, rows);
            return Then::Go;
        }
        match code {
            KeyCode::Char('q') | KeyCode::Esc => return Then::Quit,
            KeyCode::Char('?' | 'h') => self.mode = Mode::Help,
            KeyCode::Char('/') => self.mode = Mode::Filter,
            KeyCode::Char('s') => {
                let at = Sort::ALL.iter().position(|sort| *sort == self.sort).unwrap_or(0);
                self.sort = Sort::ALL.get(at + 1).copied().unwrap_or_default();
            }
            KeyCode::Enter => {
                self.go(sample, 0);
                self.mode = Mode::Process;
            }
            KeyCode::Char('e') => return self.record(sample),
            KeyCode::Char(c) => {
                if let Some(sort) = Sort::ALL.into_iter().find(|sort| sort.words().1 == c) {
                    self.sort = sort;
                }
            }
            _ => {}
        }
        Then::Go
    }

    /// Ends the view to record the selected process.
    fn record(&mut self, sample: &Sample) -> Then {
        let rows = self.rows(sample);
        self.record = rows.get(self.selected_row(&rows)).map(|row| row.pid).filter(|_| self.can_record);
        if self.record.is_some() { Then::Quit } else { Then::Go }
    }

    /// Handles the mouse.
    pub fn mouse(&mut self, mouse: MouseEvent, sample: &Sample) {
        match mouse.kind {
            MouseEventKind::ScrollDown => self.go(sample, 1),
            MouseEventKind::ScrollUp => self.go(sample, -1),
            MouseEventKind::Down(MouseButton::Left) if self.mode == Mode::List => {
                let (first, pids) = &self.drawn;
                let row = usize::from(mouse.row.saturating_sub(*first));
                let Some(&pid) = pids.get(row).filter(|_| mouse.row >= *first) else { return };
                if self.selected == Some(pid) {
                    self.mode = Mode::Process;
                }
                self.selected = Some(pid);
            }
            MouseEventKind::Down(MouseButton::Right) if self.mode == Mode::Process => self.mode = Mode::List,
            _ => {}
        }
    }

    fn go(&mut self, sample: &Sample, by: isize) {
        let rows = self.rows(sample);
        let at = self.selected_row(&rows).saturating_add_signed(by).min(rows.len().saturating_sub(1));
        self.selected = rows.get(at).map(|row| row.pid);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::store::tests::process;

    fn sample() -> Sample {
        let mut sample = Sample::default();
        sample.view.processes = vec![process(1, 30), process(2, 10), process(3, 20)];
        sample
    }

    fn pids(state: &State, sample: &Sample) -> Vec<u32> {
        state.rows(sample).iter().map(|row| row.pid).collect()
    }

    fn press(state: &mut State, sample: &Sample, codes: &[KeyCode]) -> Then {
        codes.iter().map(|&code| state.key(KeyEvent::new(code, KeyModifiers::NONE), sample)).last().unwrap()
    }

    #[test]
    fn the_list_is_ordered_filtered_and_gone_through_by_keys() {
        let (mut state, sample) = (State::default(), sample());
        assert_eq!(pids(&state, &sample), [1, 3, 2]);
        press(&mut state, &sample, &[KeyCode::Char('n')]);
        assert_eq!(pids(&state, &sample), [1, 2, 3]);
        press(&mut state, &sample, &[KeyCode::Down, KeyCode::Enter]);
        assert_eq!((state.mode, state.open()), (Mode::Process, Some(2)));
        press(&mut state, &sample, &[KeyCode::Esc, KeyCode::Char('/'), KeyCode::Char('P'), KeyCode::Char('3'), KeyCode::Enter]);
        assert_eq!(pids(&state, &sample), [3]);
        assert_eq!(press(&mut state, &sample, &[KeyCode::Char('q')]), Then::Quit);
    }

    #[test]
    fn a_process_is_recorded_only_where_it_can_be() {
        let sample = sample();
        for can_record in [false, true] {
            let mut state = State { can_record, ..State::default() };
            let then = press(&mut state, &sample, &[KeyCode::Down, KeyCode::Char('e')]);
            let expected = if can_record { (Then::Quit, Some(3)) } else { (Then::Go, None) };
            assert_eq!((then, state.record), expected);
        }
    }

    #[test]
    fn a_click_selects_and_a_second_one_opens() {
        let (mut state, sample) = (State { drawn: (2, vec![1, 3, 2]), ..State::default() }, sample());
        let click = |row| MouseEvent { kind: MouseEventKind::Down(MouseButton::Left), column: 5, row, modifiers: KeyModifiers::NONE };
        state.mouse(click(3), &sample);
        assert_eq!((state.selected, state.open()), (Some(3), None));
        state.mouse(click(3), &sample);
        assert_eq!(state.open(), Some(3));
        state.mouse(click(9), &sample);
        assert_eq!(state.open(), Some(3), "nothing is there");
    }
}
