//! Draws a sample and the view's state as one frame of the terminal. Pure.
//!
//! ```text
//! title
//! table of processes, if there are several
//! figures of the selected one
//! bar of its heap
//! table of its stacks, or one stack in full
//! footer: filter, sort, keys
//! ```

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::bar::bar;
use super::sample::{ProcessSample, Sample, SortKey, StackSample};
use super::state::{KEYS, Mode, State};
use super::words::{self, LABEL_COLUMNS, Tone};
use crate::profile::page::{place, shortened_front, shortened_middle, wrapped};
use crate::sanitize;
use crate::units::grouped;

/// Processes shown in their table, always including the selected one.
const PROCESSES_SHOWN: usize = 8;
/// Most terminal lines for one line of the figures.
const WRAPPED_LINES_MAX: usize = 3;
/// Fewest lines for the stacks; the figures are cut first.
const STACK_LINES_MIN: u16 = 5;
/// Fewest columns for names of stacks; number columns are left out first.
const NAME_COLUMNS_MIN: usize = 40;
/// Every column of the stacks' numbers.
const ALL_COLUMNS: [usize; 6] = [0, 1, 2, 3, 4, 5];

/// The styles. Without colours, bold, dim and reversed text remain.
#[derive(Debug, Clone, Copy)]
pub(super) struct Theme {
    colour: bool,
}

impl Theme {
    pub fn strong() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    pub fn faint() -> Style {
        Style::new().add_modifier(Modifier::DIM)
    }

    fn selected() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub fn coloured(self, colour: Color) -> Style {
        if self.colour { Style::new().fg(colour) } else { Style::new() }
    }

    fn warn(self) -> Style {
        self.coloured(Color::Yellow).add_modifier(Modifier::BOLD)
    }
}

/// Draws everything.
pub fn draw(frame: &mut Frame<'_>, sample: Option<&Sample>, state: &State, colour: bool) {
    let theme = Theme { colour };
    let area = frame.area();
    let Some((sample, process)) = sample.and_then(|sample| Some((sample, state.process(sample)?))) else {
        frame.render_widget(Line::from("fragprof: waiting for the first sample (q quits)"), area);
        return;
    };
    let columns = usize::from(area.width);
    let table = if sample.processes.len() > 1 { processes(sample, process, columns) } else { Vec::new() };
    let mut figures = figures(sample, process, columns, theme);
    figures.extend(bar(process, columns, theme));

    let fixed = 2 + lines(table.len());
    let figures_lines = lines(figures.len()).min(area.height.saturating_sub(fixed + STACK_LINES_MIN));
    let [title_area, table_area, figures_area, body, footer_area] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(lines(table.len())),
        Constraint::Length(figures_lines),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .areas(area);
    frame.render_widget(
        Line::from(vec![Span::styled("fragprof top  ", Theme::faint()), Span::styled(words::title(sample, process), Theme::strong())]),
        title_area,
    );
    frame.render_widget(Paragraph::new(table), table_area);
    frame.render_widget(Paragraph::new(figures), figures_area);
    if state.mode == Mode::Stack {
        stack_in_full(frame, body, process, state, theme);
    } else {
        stacks(frame, body, process, state);
    }
    frame.render_widget(footer(process, state, theme), footer_area);
    if state.mode == Mode::Help {
        help(frame, area);
    }
}

fn lines(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

fn processes(sample: &Sample, chosen: &ProcessSample, columns: usize) -> Vec<Line<'static>> {
    let all = &sample.processes;
    let at = all.iter().position(|process| process.pid == chosen.pid).unwrap_or(0);
    let first = first_shown(at, all.len(), PROCESSES_SHOWN);
    let heads = words::PROCESS_HEADS.map(|(head, _)| head);
    let count = if all.len() > PROCESSES_SHOWN { format!(" ({} of {})", at + 1, all.len()) } else { String::new() };
    let mut table = vec![Line::styled(format!("{}PROCESS{count}", words::aligned(&words::PROCESS_HEADS, heads)), Theme::strong())];
    for process in all.iter().skip(first).take(PROCESSES_SHOWN) {
        let cells = words::process_columns(process);
        let mut text = words::aligned(&words::PROCESS_HEADS, cells.iter().map(String::as_str));
        text.push_str(&sanitize::terminal(&process.comm));
        if let Some(end) = &process.end {
            text.push_str(&format!(" ({end})"));
        }
        if !process.doubts.is_empty() {
            text.push_str(" (in doubt)");
        }
        let style = if process.pid == chosen.pid { Theme::selected() } else { Style::new() };
        table.push(Line::styled(format!("{text:<columns$}"), style));
    }
    table
}

/// The first row shown of `count`, so that row `at` is among the `room` shown.
pub fn first_shown(at: usize, count: usize, room: usize) -> usize {
    if at < room { 0 } else { (at + 1 - room).min(count.saturating_sub(room)) }
}

fn figures(sample: &Sample, process: &ProcessSample, columns: usize, theme: Theme) -> Vec<Line<'static>> {
    let mut figures = Vec::new();
    for line in words::figures(sample, process) {
        let style = if line.tone == Tone::Warn { theme.warn() } else { Style::new() };
        let parts = wrapped(&line.text, columns.saturating_sub(LABEL_COLUMNS).max(1));
        for (index, part) in parts.into_iter().take(WRAPPED_LINES_MAX).enumerate() {
            let label = if index == 0 { line.label } else { "" };
            figures.push(Line::from(vec![Span::styled(format!("{label:<LABEL_COLUMNS$}"), Theme::strong()), Span::styled(part, style)]));
        }
    }
    figures
}

fn stacks(frame: &mut Frame<'_>, area: Rect, process: &ProcessSample, state: &State) {
    let columns = usize::from(area.width);
    let rows = state.rows(process);
    let shown = shown_columns(columns, state.sort);
    let mut text = vec![Line::styled(stack_heads(&shown, state.sort), Theme::strong())];
    if rows.is_empty() {
        let empty =
            if process.stacks.is_empty() { "no allocation has been seen yet" } else { "no stack has a frame that matches the filter" };
        text.push(Line::styled(empty, Theme::faint()));
    }
    let room = usize::from(area.height).saturating_sub(1);
    let at = state.selected_row(&rows);
    for (index, stack) in rows.iter().enumerate().skip(first_shown(at, rows.len(), room)).take(room) {
        let line = stack_row(stack, process.totals.inuse_bytes, &shown, columns);
        text.push(if index == at { line.style(Theme::selected()) } else { line });
    }
    frame.render_widget(Paragraph::new(text), area);
}

/// The number columns that fit next to the names: growth is left out first, then the share and the rates, but never the sort column.
fn shown_columns(columns: usize, sort: SortKey) -> Vec<usize> {
    let sorted = column_of(sort);
    let mut shown: Vec<usize> = (0..words::STACK_HEADS.len()).collect();
    for gone in [5, 1, 4, 3] {
        let used: usize = shown.iter().map(|&column| words::STACK_HEADS[column].1 + 1).sum();
        if columns.saturating_sub(used) >= NAME_COLUMNS_MIN {
            break;
        }
        shown.retain(|&column| column != gone || column == sorted);
    }
    shown
}

/// The column of [`words::STACK_HEADS`] that shows a sort key.
fn column_of(sort: SortKey) -> usize {
    match sort {
        SortKey::Live => 0,
        SortKey::Count => 2,
        SortKey::BytesPerSecond => 3,
        SortKey::AllocationsPerSecond => 4,
        SortKey::Growth => 5,
    }
}

/// Heads of the columns, the one sorted by marked.
fn stack_heads(shown: &[usize], sort: SortKey) -> String {
    let head = |column: usize| {
        let (head, _) = words::STACK_HEADS[column];
        if column == column_of(sort) { format!("▼{head}") } else { head.to_owned() }
    };
    let heads: Vec<String> = shown.iter().map(|&column| head(column)).collect();
    let widths: Vec<(&str, usize)> = shown.iter().map(|&column| words::STACK_HEADS[column]).collect();
    format!("{}STACK", words::aligned(&widths, heads.iter().map(String::as_str)))
}

fn stack_row(stack: &StackSample, total_bytes: u64, shown: &[usize], columns: usize) -> Line<'static> {
    let cells = words::stack_columns(stack, total_bytes);
    let widths: Vec<(&str, usize)> = shown.iter().map(|&column| words::STACK_HEADS[column]).collect();
    let numbers = words::aligned(&widths, shown.iter().map(|&column| cells[column].as_str()));
    let room = columns.saturating_sub(numbers.chars().count());
    let Some(title) = stack.named.title() else {
        return Line::from(vec![Span::raw(numbers), Span::styled("[not named yet]", Theme::faint())]);
    };
    let name = sanitize::terminal(&title.function).into_owned();
    let place = shortened_front(&place(title), room.saturating_sub(name.chars().count() + 2).max(room / 3));
    let name_room = if place.is_empty() { room } else { room.saturating_sub(place.chars().count() + 2) };
    let name = shortened_middle(&name, name_room);
    let filled = name.chars().count() + if place.is_empty() { 0 } else { place.chars().count() + 2 };
    let gap = if place.is_empty() { "" } else { "  " };
    Line::from(vec![
        Span::raw(numbers),
        Span::styled(name, Theme::strong()),
        Span::styled(format!("{gap}{place}{:1$}", "", room.saturating_sub(filled)), Theme::faint()),
    ])
}

fn stack_in_full(frame: &mut Frame<'_>, area: Rect, process: &ProcessSample, state: &State, theme: Theme) {
    let rows = state.rows(process);
    let Some(stack) = rows.get(state.selected_row(&rows)) else {
        frame.render_widget(Line::styled("the stack is no longer among the largest (Esc: back)", Theme::faint()), area);
        return;
    };
    let numbers = &stack.numbers;
    let mut text = vec![
        Line::styled(stack_heads(&ALL_COLUMNS, state.sort), Theme::strong()),
        stack_row(stack, process.totals.inuse_bytes, &ALL_COLUMNS, usize::from(area.width)),
        Line::from(format!(
            "allocated since attach: {} in {} allocations{}",
            crate::units::HumanBytes(numbers.allocated_bytes),
            grouped(numbers.allocations),
            if numbers.doubtful_bytes > 0 {
                format!("; in doubt: {} of the live bytes", crate::units::HumanBytes(numbers.doubtful_bytes))
            } else {
                String::new()
            }
        )),
        Line::default(),
    ];
    let first = text.len();
    let columns = usize::from(area.width);
    for (index, found) in stack.named.frames.iter().enumerate() {
        let name = sanitize::terminal(&found.function);
        let mark = if index == stack.named.title { "▶" } else { " " };
        let mut place = place(found);
        if !found.file.is_empty() && !found.module.is_empty() {
            place.push_str(&format!(" in {}", sanitize::terminal(found.module.rsplit('/').next().unwrap_or_default())));
        }
        for (given, note) in
            [(found.flags.inlined, " (inlined)"), (found.flags.guessed, " (guessed)"), (found.flags.jit, " (generated code)")]
        {
            if given {
                place.push_str(note);
            }
        }
        let room = columns.saturating_sub(8);
        let style = if index == stack.named.title { Theme::strong() } else { Style::new() };
        text.push(Line::from(vec![
            Span::raw(format!("{mark}{index:>3}  ")),
            Span::styled(shortened_middle(&name, room), style),
            Span::styled(
                format!("  {}", shortened_front(&place, room.saturating_sub(name.chars().count() + 2).max(room / 3))),
                Theme::faint(),
            ),
        ]));
    }
    if let Some(reason) = stack.named.truncated {
        text.push(Line::styled(format!("      … cut: {reason}"), theme.warn()));
    }
    // Scrolling ends with the last frame on the last line.
    let room = usize::from(area.height).saturating_sub(first).max(1);
    let scroll = state.scroll.min(text.len().saturating_sub(first + room));
    text.drain(first..first + scroll);
    frame.render_widget(Paragraph::new(text), area);
}

fn footer(process: &ProcessSample, state: &State, theme: Theme) -> Line<'static> {
    if state.over {
        return Line::styled("all processes have ended: this is the last sample. Press any key to quit.", theme.warn());
    }
    if state.mode == Mode::Filter {
        return Line::from(vec![
            Span::styled("show stacks with: ", Theme::strong()),
            Span::raw(sanitize::terminal(&state.filter).into_owned()),
            Span::styled("▏", Theme::strong()),
            Span::styled("  Enter applies it, Esc shows all", Theme::faint()),
        ]);
    }
    let mut text = format!("{} stacks by {}", grouped(process.stacks_with_value as u64), state.sort.words());
    if process.stacks_with_value > process.stacks.len() {
        text = format!("the largest {} of {text}", grouped(process.stacks.len() as u64));
    }
    if !state.filter.is_empty() {
        text.push_str(&format!(" with \"{}\"", sanitize::terminal(&state.filter)));
    }
    Line::styled(format!("{text}   ? help  s sort  / filter  Enter stack  q quit"), Theme::faint())
}

fn help(frame: &mut Frame<'_>, area: Rect) {
    let keys = KEYS.iter().map(|(key, does)| Line::from(vec![Span::styled(format!("{key:<16}"), Theme::strong()), Span::raw(*does)]));
    let text: Vec<Line<'_>> = keys.collect();
    let widest = text.iter().map(Line::width).max().unwrap_or(0);
    let width = u16::try_from(widest + 4).unwrap_or(u16::MAX).min(area.width);
    let height = lines(text.len() + 2).min(area.height);
    let [area] = Layout::vertical([Constraint::Length(height)]).flex(ratatui::layout::Flex::Center).areas(area);
    let [area] = Layout::horizontal([Constraint::Length(width)]).flex(ratatui::layout::Flex::Center).areas(area);
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" keys (any key closes) ").padding(ratatui::widgets::Padding::horizontal(1));
    frame.render_widget(Paragraph::new(text).block(block), area);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::time::Instant;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::tui::sample::Numbers;
    use crate::tui::testing::{frame as named, shop, stack};

    fn drawn(columns: u16, rows: u16, sample: Option<&Sample>, state: &State) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).unwrap();
        terminal.draw(|frame| draw(frame, sample, state, true)).unwrap();
        terminal
    }

    fn one() -> Sample {
        let mut sample = shop();
        sample.processes.truncate(1);
        sample.losses[1].value = 0;
        sample
    }

    #[test]
    fn one_process_has_its_figures_its_bar_and_its_stacks() {
        insta::assert_snapshot!(drawn(110, 16, Some(&one()), &State::default()).backend());
    }

    #[test]
    fn several_processes_have_a_table_and_the_chosen_one_its_doubts() {
        let state = State { pid: Some(4243), over: true, ..State::default() };
        insta::assert_snapshot!(drawn(110, 20, Some(&shop()), &state).backend());
    }

    #[test]
    fn a_stack_in_full_has_every_frame_with_its_place() {
        let state = State { mode: Mode::Stack, ..State::default() };
        insta::assert_snapshot!(drawn(110, 20, Some(&one()), &state).backend());
    }

    #[test]
    fn a_small_terminal_keeps_space_for_stacks() {
        let state = State { sort: SortKey::AllocationsPerSecond, ..State::default() };
        insta::assert_snapshot!(drawn(80, 12, Some(&one()), &state).backend());
    }

    #[test]
    fn the_filter_is_shown_while_it_is_typed() {
        let state = State { mode: Mode::Filter, filter: "pars".into(), ..State::default() };
        insta::assert_snapshot!(drawn(90, 14, Some(&one()), &state).backend());
    }

    #[test]
    fn help_lists_the_keys() {
        let state = State { mode: Mode::Help, ..State::default() };
        insta::assert_snapshot!(drawn(110, 20, Some(&one()), &state).backend());
    }

    #[test]
    fn every_size_of_terminal_can_be_drawn() {
        for mode in [Mode::Stacks, Mode::Stack, Mode::Filter, Mode::Help] {
            for (columns, rows) in [(0, 0), (1, 1), (3, 2), (20, 3), (79, 5), (500, 100)] {
                let state = State { mode, scroll: 1000, filter: String::new(), ..State::default() };
                drawn(columns, rows, Some(&shop()), &state);
                drawn(columns, rows, None, &state);
            }
        }
    }

    #[test]
    fn no_control_character_of_a_process_reaches_the_terminal() {
        let mut sample = shop();
        sample.processes[0].comm = "a\u{1b}]0;x\u{7}\nb".into();
        for mode in [Mode::Stacks, Mode::Stack] {
            let state = State { mode, sort: SortKey::AllocationsPerSecond, ..State::default() };
            let terminal = drawn(120, 24, Some(&sample), &state);
            let all: String = terminal.backend().buffer().content().iter().map(|cell| cell.symbol()).collect();
            assert!(!all.contains(char::is_control), "{all}");
            assert!(all.contains("\\u{1b}"), "{all}");
        }
    }

    #[test]
    fn without_colours_no_cell_has_one() {
        let mut terminal = Terminal::new(TestBackend::new(110, 20)).unwrap();
        terminal.draw(|frame| draw(frame, Some(&shop()), &State { over: true, ..State::default() }, false)).unwrap();
        assert!(terminal.backend().buffer().content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    }

    #[test]
    fn the_selected_row_is_always_shown() {
        for (at, count, room) in [(0, 0, 5), (0, 3, 5), (4, 100, 5), (5, 100, 5), (99, 100, 5), (7, 8, 1)] {
            let first = first_shown(at, count, room);
            assert!((first..first + room).contains(&at), "{at} of {count} in {room}");
        }
    }

    /// Prints what a frame of the largest sample costs: `cargo test --release --lib tui::draw -- --ignored --nocapture`.
    #[test]
    #[ignore = "a measurement"]
    fn cost_of_a_frame() {
        let mut sample = one();
        let long = "ns::Container<ns::Key, ns::Value, std::allocator<std::pair<ns::Key const, ns::Value> > >::insert(ns::Key const&)";
        sample.processes[0].stacks = (0..1000)
            .map(|id| {
                stack(
                    id,
                    Numbers { inuse_bytes: u64::from(id) * 977 % 1000, ..Numbers::default() },
                    vec![named(long, "src/container.h", 7); 40],
                )
            })
            .collect();
        let state = State { filter: "zzz main".into(), ..State::default() };
        for state in [&State::default(), &state] {
            let mut terminal = Terminal::new(TestBackend::new(250, 80)).unwrap();
            let began = Instant::now();
            for _ in 0..100 {
                terminal.draw(|frame| draw(frame, Some(&sample), state, true)).unwrap();
            }
            println!("filter {:?}: {:.2} ms per frame", state.filter, began.elapsed().as_secs_f64() * 10.0);
        }
    }
}
