//! Choosing a process from a list: its state, its keys, its picture. Pure.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;

use super::draw::first_shown;
use super::processes::Candidate;
use super::state::contains;
use crate::profile::sanitize;
use crate::units::HumanBytes;

/// Characters that a filter may have.
const FILTER_CHARS_MAX: usize = 100;
/// Rows that PageUp and PageDown move by.
const PAGE_ROWS: isize = 10;

/// What a key did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chosen {
    /// Nothing yet.
    Not,
    /// The user leaves.
    Quit,
    /// This pid is to be watched.
    Pid(u32),
}

/// The state of the choice. Letters go into the filter at once; a number finds a pid.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    filter: String,
    /// Pid of the selected row; `None` = the first.
    selected: Option<u32>,
}

impl Choice {
    fn rows<'a>(&self, candidates: &'a [Candidate]) -> Vec<&'a Candidate> {
        candidates.iter().filter(|one| contains(&one.comm, &self.filter) || one.pid.to_string().starts_with(&self.filter)).collect()
    }

    fn selected_row(&self, rows: &[&Candidate]) -> usize {
        rows.iter().position(|one| Some(one.pid) == self.selected).unwrap_or(0)
    }

    /// Takes a key.
    pub fn key(&mut self, key: KeyEvent, candidates: &[Candidate]) -> Chosen {
        let rows = self.rows(candidates);
        let at = self.selected_row(&rows);
        let go = |by: isize| rows.get(at.saturating_add_signed(by).min(rows.len().saturating_sub(1))).map(|one| one.pid);
        match key.code {
            KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => return Chosen::Quit,
            KeyCode::Esc if self.filter.is_empty() => return Chosen::Quit,
            KeyCode::Char('q') if self.filter.is_empty() => return Chosen::Quit,
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Enter => return rows.get(at).map_or(Chosen::Not, |one| Chosen::Pid(one.pid)),
            KeyCode::Down => self.selected = go(1),
            KeyCode::Up => self.selected = go(-1),
            KeyCode::PageDown => self.selected = go(PAGE_ROWS),
            KeyCode::PageUp => self.selected = go(-PAGE_ROWS),
            KeyCode::Home => self.selected = go(isize::MIN),
            KeyCode::End => self.selected = go(isize::MAX),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) if self.filter.chars().count() < FILTER_CHARS_MAX => self.filter.push(c),
            _ => {}
        }
        Chosen::Not
    }
}

/// Draws the list.
pub fn draw(frame: &mut Frame<'_>, candidates: &[Candidate], choice: &Choice) {
    let strong = Style::new().add_modifier(Modifier::BOLD);
    let faint = Style::new().add_modifier(Modifier::DIM);
    let [head, body, foot] = Layout::vertical([Constraint::Length(2), Constraint::Min(0), Constraint::Length(1)]).areas(frame.area());
    let rows = choice.rows(candidates);
    let at = choice.selected_row(&rows);
    let title =
        Line::styled("fragprof top  which process? Its mallocs and frees will cost it about 2 µs each while it is watched.", strong);
    frame.render_widget(Paragraph::new(vec![title, Line::styled(format!("{:>8} {:>10} PROCESS", "PID", "RESIDENT"), strong)]), head);
    let (room, columns) = (usize::from(body.height), usize::from(body.width));
    let line = |(index, one): (usize, &&Candidate)| {
        let text = format!("{:>8} {:>10} {}", one.pid, HumanBytes(one.rss_bytes).to_string(), sanitize::terminal(&one.comm));
        let style = if index == at { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        Line::styled(format!("{text:<columns$}"), style)
    };
    let shown: Vec<Line<'_>> = rows.iter().enumerate().skip(first_shown(at, rows.len(), room)).take(room).map(line).collect();
    frame.render_widget(Paragraph::new(shown), body);
    let filter = sanitize::terminal(&choice.filter);
    let typed = if filter.is_empty() { "type a name or a pid".to_owned() } else { format!("with \"{filter}\"") };
    frame.render_widget(Line::styled(format!("{typed}   ↑ ↓ select  Enter watch  Esc back"), faint), foot);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    fn candidates() -> Vec<Candidate> {
        let one = |pid, comm: &str, mib: u64| Candidate { pid, comm: comm.into(), rss_bytes: mib << 20 };
        vec![one(4242, "shop", 700), one(77, "post\u{1b}[2Jgres", 300), one(78, "worker", 5)]
    }

    fn press(choice: &mut Choice, codes: &[KeyCode]) -> Chosen {
        let all = candidates();
        codes.iter().map(|&code| choice.key(KeyEvent::new(code, KeyModifiers::NONE), &all)).last().unwrap()
    }

    #[test]
    fn the_list_is_drawn_with_the_selected_process_marked() {
        let mut choice = Choice::default();
        press(&mut choice, &[KeyCode::Down]);
        let mut terminal = Terminal::new(TestBackend::new(100, 7)).unwrap();
        terminal.draw(|frame| draw(frame, &candidates(), &choice)).unwrap();
        insta::assert_snapshot!(terminal.backend());
    }

    #[test]
    fn enter_chooses_the_selected_process() {
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Enter]), Chosen::Pid(4242));
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Down, KeyCode::Down, KeyCode::Down, KeyCode::Enter]), Chosen::Pid(78));
    }

    #[test]
    fn typing_finds_names_and_pids() {
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Char('W'), KeyCode::Char('o'), KeyCode::Enter]), Chosen::Pid(78));
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Char('7'), KeyCode::Enter]), Chosen::Pid(77));
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Char('9'), KeyCode::Enter]), Chosen::Not);
    }

    #[test]
    fn escape_empties_the_filter_and_then_leaves() {
        let mut choice = Choice::default();
        assert_eq!(press(&mut choice, &[KeyCode::Char('w'), KeyCode::Char('q'), KeyCode::Esc]), Chosen::Not);
        assert_eq!(press(&mut choice, &[KeyCode::Esc]), Chosen::Quit);
        assert_eq!(press(&mut Choice::default(), &[KeyCode::Char('q')]), Chosen::Quit);
    }
}
