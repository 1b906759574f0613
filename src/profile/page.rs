//! Layout of text reports: named lines with hanging indents, tables of stacks, all cut to a width. Pure; width and colour are parameters.

use std::fmt::Write;

use crate::frame::Frame;
use crate::sanitize;
use crate::units::{HumanBytes, grouped};

/// How to lay out a report.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Columns of the terminal; `None` = do not cut lines.
    pub columns: Option<usize>,
    /// Whether to use colours.
    pub colour: bool,
    /// Stacks shown.
    pub top: usize,
    /// Callers shown per stack; the rest are counted.
    pub callers: usize,
}

/// Narrowest layout: on narrower terminals lines wrap.
const COLUMNS_MIN: usize = 60;
/// Most sentences shown of a list in the header.
const SENTENCES_SHOWN_MAX: usize = 16;

/// A share in percent, or a dash if the whole is 0.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 { "–".to_owned() } else { format!("{:.1}%", part as f64 * 100.0 / whole as f64) }
}

/// A share in percent, rounded down: 100 only if it is the whole.
pub(crate) fn percent_floor(share: f64) -> String {
    let tenths = (share * 1000.0 + 1e-9).floor() / 10.0;
    if tenths == tenths.trunc() { format!("{tenths:.0}") } else { format!("{tenths:.1}") }
}

/// A number of bytes that may not be known.
pub(crate) fn bytes(value: Option<u64>) -> String {
    value.map_or_else(|| "not known".to_owned(), |value| HumanBytes(value).to_string())
}

#[derive(Clone, Copy)]
pub(super) enum Tone {
    /// Plain.
    Plain,
    /// Heads and titles.
    Strong,
    /// Less important.
    Faint,
    /// Warnings.
    Warn,
}

/// One stack of a table.
#[derive(Default)]
pub(super) struct StackText<'a> {
    /// The frames to show, the function that allocated the memory first.
    pub frames: &'a [&'a Frame],
    /// The allocator's functions that it called; empty = not known.
    pub allocated_by: &'a str,
    /// Why the walk ended early.
    pub truncated: Option<&'a str>,
    /// The process, if there are several; 0 = only one.
    pub pid: u32,
    /// Number of different paths to the last frame that is shown.
    pub ways: usize,
}

/// A page of text that fits its width.
pub(super) struct Page {
    pub text: String,
    pub layout: Layout,
}

impl Page {
    pub fn new(layout: Layout) -> Self {
        Self { text: String::new(), layout }
    }

    pub fn painted(&mut self, text: &str, tone: Tone) {
        let code = match tone {
            Tone::Plain => "",
            Tone::Strong => "\x1b[1m",
            Tone::Faint => "\x1b[2m",
            Tone::Warn => "\x1b[33m",
        };
        if self.layout.colour && !code.is_empty() {
            let _ = write!(self.text, "{code}{text}\x1b[0m");
        } else {
            self.text.push_str(text);
        }
    }

    pub fn line(&mut self, text: &str) {
        self.text.push_str(text);
        self.text.push('\n');
    }

    /// A remark below a table, wrapped.
    pub fn faint(&mut self, text: &str) {
        for part in wrapped(text, self.columns()) {
            self.painted(&part, Tone::Faint);
            self.text.push('\n');
        }
    }

    pub fn head(&mut self, text: &str) {
        self.painted(text, Tone::Strong);
        self.text.push('\n');
    }

    fn columns(&self) -> usize {
        self.layout.columns.map_or(usize::MAX, |columns| columns.max(COLUMNS_MIN))
    }

    /// A named line of the header, wrapped with a hanging indent.
    pub fn field(&mut self, name: &str, text: &str) {
        self.toned(name, text, Tone::Plain);
    }

    pub fn toned(&mut self, name: &str, text: &str, tone: Tone) {
        const NAME_COLUMNS: usize = 11;
        for (i, part) in wrapped(text, self.columns().saturating_sub(NAME_COLUMNS)).iter().enumerate() {
            let name = format!("{:<NAME_COLUMNS$}", if i == 0 { name } else { "" });
            self.painted(&name, Tone::Strong);
            self.painted(part, tone);
            self.text.push('\n');
        }
    }

    pub fn sentences(&mut self, name: &str, sentences: &[String], tone: Tone) {
        for sentence in sentences.iter().take(SENTENCES_SHOWN_MAX) {
            self.toned(name, &sanitize::terminal(sentence), tone);
        }
        if sentences.len() > SENTENCES_SHOWN_MAX {
            self.toned(name, &format!("and {} more", sentences.len() - SENTENCES_SHOWN_MAX), tone);
        }
    }

    /// A stack: its title after the prefix, its callers below.
    pub fn stack(&mut self, prefix: &str, stack: &StackText<'_>) {
        let indent = " ".repeat(prefix.chars().count());
        let room = self.columns().saturating_sub(indent.len());
        let Some((title, callers)) = stack.frames.split_first() else { return };
        self.painted(prefix, Tone::Strong);
        let process = if stack.pid == 0 { String::new() } else { format!("[{}] ", stack.pid) };
        self.frame(&process, title, stack.allocated_by, room, Tone::Strong);
        for caller in callers.iter().take(self.layout.callers) {
            self.text.push_str(&indent);
            self.frame("  ← ", caller, "", room, Tone::Plain);
        }
        let more = callers.len().saturating_sub(self.layout.callers);
        let more = match stack.ways {
            0 | 1 if more == 0 => None,
            0 | 1 => Some(format!("  … {more} more")),
            ways => Some(format!("  … called in {ways} ways: show more callers with --callers")),
        };
        if let Some(more) = more {
            self.text.push_str(&indent);
            self.painted(&more, Tone::Faint);
            self.text.push('\n');
        }
        if let Some(reason) = stack.truncated {
            self.text.push_str(&indent);
            self.painted(&format!("  … cut: {}", sanitize::terminal(reason).replace('_', " ")), Tone::Warn);
            self.text.push('\n');
        }
    }

    fn frame(&mut self, lead: &str, frame: &Frame, allocated_by: &str, room: usize, tone: Tone) {
        let name = sanitize::terminal(&frame.function);
        let mut place = place(frame);
        if frame.flags.guessed {
            place.push_str("  (guessed)");
        }
        if !allocated_by.is_empty() {
            let lead = if place.is_empty() { "" } else { "  " };
            let _ = write!(place, "{lead}({})", sanitize::terminal(allocated_by));
        }
        let room = room.saturating_sub(lead.chars().count());
        // The function matters more: the location is shortened first, from the front, down to a third.
        let place_room = room.saturating_sub(name.chars().count() + 2).max(room / 3);
        let place = shortened_front(&place, place_room);
        let name_room = if place.is_empty() { room } else { room.saturating_sub(place.chars().count() + 2) };
        self.text.push_str(lead);
        self.painted(&shortened_middle(&name, name_room), tone);
        if !place.is_empty() {
            self.text.push_str("  ");
            self.painted(&place, Tone::Faint);
        }
        self.text.push('\n');
    }

    pub fn rest(&mut self, rows: usize, value: String) {
        if rows > self.layout.top {
            let text = format!("{} more stacks with {value}: show more with --top", grouped((rows - self.layout.top) as u64));
            self.painted(&text, Tone::Faint);
            self.text.push('\n');
        }
    }
}

/// The location of a frame: file and line, or the module.
pub(crate) fn place(frame: &Frame) -> String {
    let file = sanitize::terminal(&frame.file);
    match (file.is_empty(), frame.line) {
        (false, 0) => file.into_owned(),
        (false, line) => format!("{file}:{line}"),
        (true, _) => {
            let module = frame.module.rsplit('/').next().unwrap_or_default();
            // A substitute name contains the module already.
            if frame.function.starts_with('[') { String::new() } else { sanitize::terminal(module).into_owned() }
        }
    }
}

/// A text shortened to a width in the middle: the start and the end of a name matter most.
pub(crate) fn shortened_middle(text: &str, columns: usize) -> String {
    let length = text.chars().count();
    if length <= columns {
        return text.to_owned();
    }
    let kept = columns.saturating_sub(1);
    let tail = kept / 2;
    text.chars().take(kept - tail).chain(['…']).chain(text.chars().skip(length - tail)).collect()
}

/// A text shortened to a width at the front: the end of a path matters most.
pub(crate) fn shortened_front(text: &str, columns: usize) -> String {
    let length = text.chars().count();
    if length <= columns {
        return text.to_owned();
    }
    std::iter::once('…').chain(text.chars().skip(length - columns.saturating_sub(1))).collect()
}

/// A text in lines of at most `columns`, broken at spaces; a longer word is on a line of its own.
pub(crate) fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > columns {
            lines.push(std::mem::take(&mut line));
        } else if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}
