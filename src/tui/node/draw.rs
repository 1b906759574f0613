//! Draws an agent's sample and the view's state as one frame of the terminal. Pure.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph, Wrap};

use super::Sample;
use super::cells::{self, Cell};
use super::state::{KEYS, Mode, State};
use crate::model::view::ProcessView;
use crate::sanitize;
use crate::tui::draw::first_shown;
use crate::units::HumanBytes;

/// Most lines of the address space; the stacks get the rest.
const STRIP_LINES_MAX: usize = 12;

fn strong() -> Style {
    Style::new().add_modifier(Modifier::BOLD)
}

fn faint() -> Style {
    Style::new().add_modifier(Modifier::DIM)
}

/// Draws everything; stores the positions of the rows in `state`.
pub fn draw(frame: &mut Frame<'_>, sample: Option<&Sample>, state: &mut State, title: &str, colour: bool) {
    let area = frame.area();
    let Some(sample) = sample else {
        frame.render_widget(Line::from(format!("fragprof top: waiting for {title} (q quits)")), area);
        return;
    };
    let [head, body, foot] = Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(1)]).areas(area);
    let what = match &sample.error {
        Some(error) => Span::styled(
            format!("NO ANSWER, showing old figures: {}", sanitize::terminal(error)),
            strong().fg(if colour { Color::Red } else { Color::Reset }),
        ),
        None => Span::styled(format!("{} processes, {:.0} s old", sample.view.processes.len(), sample.view.age_s), Style::new()),
    };
    frame.render_widget(Line::from(vec![Span::styled(format!("fragprof top  {title}  "), faint()), what]), head);
    let open = state.selected.filter(|_| state.mode == Mode::Process);
    match open {
        Some(pid) => match sample.view.processes.iter().find(|one| one.pid == pid) {
            Some(process) => self::process(frame, body, sample, process, colour),
            None => frame.render_widget(Line::from(format!("process {pid} has ended, or is no longer watched (Esc: back)")), body),
        },
        None => list(frame, body, sample, state),
    }
    let filter = sanitize::terminal(&state.filter).into_owned();
    let shown = match state.mode {
        Mode::Filter => format!("show only: {filter}▏ (Enter applies it, Esc clears it)"),
        Mode::Process => "Esc back  ↑ ↓ next process  ? keys  q quit".to_owned(),
        _ if filter.is_empty() => format!("by {}  s sort  / filter  Enter open  ? keys  q quit", state.sort.words().0),
        _ => format!("by {}, with \"{filter}\"  s sort  / filter  Enter open  ? keys  q quit", state.sort.words().0),
    };
    frame.render_widget(Line::styled(shown, faint()), foot);
    if state.mode == Mode::Help {
        help(frame, area);
    }
}

fn list(frame: &mut Frame<'_>, area: Rect, sample: &Sample, state: &mut State) {
    let columns = usize::from(area.width);
    let room = usize::from(area.height).saturating_sub(1);
    let rows = state.rows(sample);
    let at = state.selected_row(&rows);
    let first = first_shown(at, rows.len(), room);
    let shown: Vec<(u32, String)> =
        rows.iter().skip(first).take(room).map(|one| (one.pid, cells::line(&cells::columns(one), &cells::name(one), columns))).collect();
    let mut lines = vec![Line::styled(cells::heads(columns), strong())];
    for (index, (_, text)) in shown.iter().enumerate() {
        let style = if first + index == at { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        lines.push(Line::styled(format!("{text:<columns$}"), style));
    }
    state.drawn = (area.y.saturating_add(1), shown.into_iter().map(|(pid, _)| pid).collect());
    frame.render_widget(Paragraph::new(lines), area);
}

fn process(frame: &mut Frame<'_>, area: Rect, sample: &Sample, process: &ProcessView, colour: bool) {
    let columns = usize::from(area.width);
    let mut lines =
        vec![Line::styled(format!("{} (pid {}), {} resident", cells::name(process), process.pid, HumanBytes(process.rss_bytes)), strong())];
    lines.extend(cells::figures(process).into_iter().map(|(label, text)| Line::from(format!("{label:<9}{text}"))));
    match &sample.map {
        Some(map) if map.pid == process.pid => {
            let legend = format!(
                "space    {} per character: █ live ▓ mixed ▒ pinned ░ trimmable · not resident",
                HumanBytes(sign_bytes(map.cell_bytes, cells::strip(map).len(), columns))
            );
            lines.push(Line::from(legend));
            lines.extend(strip(&cells::strip(map), columns, colour));
        }
        _ => lines
            .push(Line::from(format!("space    {}", sample.map_error.as_deref().map_or("taking a census …".into(), sanitize::terminal)))),
    }
    if let Some(profile) = sample.profile.as_ref().filter(|profile| profile.pid == process.pid) {
        lines.push(Line::styled(format!("{:>10} {:>6}  STACKS by live bytes ({}), root first", "LIVE", "%", profile.mode), strong()));
        let room = usize::from(area.height).saturating_sub(lines.len());
        lines.extend(cells::stacks(&profile.tree.root, room).into_iter().map(Line::from));
    }
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }), area);
}

/// Cells per character.
fn cells_a_sign(count: usize, columns: usize) -> usize {
    count.div_ceil((columns * STRIP_LINES_MAX).max(1)).max(1)
}

fn sign_bytes(cell_bytes: u64, count: usize, columns: usize) -> u64 {
    cell_bytes.saturating_mul(cells_a_sign(count, columns) as u64)
}

/// The address space, one character per cell or per several cells, by the most frequent kind.
fn strip(cells: &[Cell], columns: usize, colour: bool) -> Vec<Line<'static>> {
    let signs: Vec<Cell> = cells
        .chunks(cells_a_sign(cells.len(), columns))
        .filter_map(|some| some.iter().copied().max_by_key(|one| some.iter().filter(|other| *other == one).count()))
        .collect();
    signs.chunks(columns.max(1)).map(|row| Line::from(runs(row, colour))).collect()
}

fn runs(row: &[Cell], colour: bool) -> Vec<Span<'static>> {
    row.chunk_by(|a, b| a == b)
        .map(|run| {
            let cell = run.first().copied().unwrap_or(Cell::Absent);
            let style = match cell {
                _ if !colour => Style::new(),
                Cell::Absent => faint(),
                Cell::Trimmable => Style::new().fg(Color::Yellow),
                Cell::Pinned => Style::new().fg(Color::Magenta),
                Cell::Mixed => Style::new().fg(Color::Cyan),
                Cell::Live => Style::new().fg(Color::Green),
            };
            Span::styled(std::iter::repeat_n(cell.sign(), run.len()).collect::<String>(), style)
        })
        .collect()
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let lines: Vec<Line<'_>> = KEYS.iter().map(|(keys, what)| Line::from(format!(" {keys:<16} {what} "))).collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) + 2;
    let size = |cells: usize, most: u16| u16::try_from(cells).unwrap_or(most).min(most);
    let (width, height) = (size(width, area.width), size(lines.len() + 2, area.height));
    let place = Rect { x: (area.width - width) / 2, y: (area.height - height) / 2, width, height };
    frame.render_widget(Clear, place);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title(" keys ")), place);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::store::tests::process;

    fn drawn(sample: &Sample, state: &mut State, columns: u16, rows: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, Some(sample), state, "http://x", false)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn the_list_shows_the_ladder_of_each_process_and_an_absent_agent() {
        let mut sample = Sample::default();
        sample.view.processes = vec![process(1, 30), process(2, 10)];
        let text = drawn(&sample, &mut State::default(), 120, 8);
        assert!(text.contains("30.0 MiB") && text.contains("fragmentation") && text.contains("p2"), "{text}");
        sample.error = Some("connection refused".into());
        let text = drawn(&sample, &mut State::default(), 120, 8);
        assert!(text.contains("NO ANSWER, showing old figures: connection refused"), "{text}");
    }

    #[test]
    fn no_size_of_the_terminal_makes_it_fail() {
        let mut sample = Sample::default();
        sample.view.processes = (1..30).map(|pid| process(pid, 30)).collect();
        for mode in [Mode::List, Mode::Process, Mode::Help, Mode::Filter] {
            for (columns, rows) in [(1, 1), (3, 2), (20, 5), (300, 90)] {
                drawn(&sample, &mut State { mode, selected: Some(3), ..State::default() }, columns, rows);
            }
        }
    }
}
