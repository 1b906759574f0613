//! Keys with the same meaning in every list.

use crossterm::event::KeyCode;

/// Rows that a page key moves.
const PAGE_ROWS: isize = 10;

/// How many rows a key moves, downwards if positive; the ends of the list are the largest and smallest number. `None`: another key.
#[must_use]
pub fn rows(code: KeyCode) -> Option<isize> {
    match code {
        KeyCode::Down | KeyCode::Char('j') => Some(1),
        KeyCode::Up | KeyCode::Char('k') => Some(-1),
        KeyCode::PageDown => Some(PAGE_ROWS),
        KeyCode::PageUp => Some(-PAGE_ROWS),
        KeyCode::Home | KeyCode::Char('g') => Some(isize::MIN),
        KeyCode::End | KeyCode::Char('G') => Some(isize::MAX),
        _ => None,
    }
}
