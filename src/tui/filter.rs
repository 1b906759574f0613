//! Editing a filter. Pure.

use crossterm::event::KeyCode;

/// Most characters of a filter: more than a name has.
const FILTER_CHARS_MAX: usize = 100;

/// Applies a key to the filter; returns whether editing is finished. Enter keeps the filter, Esc clears it.
pub fn type_into(filter: &mut String, code: KeyCode) -> bool {
    match code {
        KeyCode::Enter => return true,
        KeyCode::Esc => {
            filter.clear();
            return true;
        }
        KeyCode::Backspace => {
            filter.pop();
        }
        KeyCode::Char(c) if filter.chars().count() < FILTER_CHARS_MAX => filter.push(c),
        _ => {}
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enter_keeps_what_was_typed_and_escape_drops_it() {
        let mut filter = String::new();
        for code in [KeyCode::Char('a'), KeyCode::Char('b'), KeyCode::Backspace] {
            assert!(!type_into(&mut filter, code));
        }
        assert!(type_into(&mut filter, KeyCode::Enter) && filter == "a");
        assert!(type_into(&mut filter, KeyCode::Esc) && filter.is_empty());
        for _ in 0..2 * FILTER_CHARS_MAX {
            type_into(&mut filter, KeyCode::Char('ä'));
        }
        assert_eq!(filter.chars().count(), FILTER_CHARS_MAX);
    }
}
