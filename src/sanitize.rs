//! Makes text from watched processes safe to show: names of functions, files and processes may contain any character, including terminal
//! escape sequences.

use std::borrow::Cow;

/// Whether a character must not reach a terminal: controls (C0, DEL, C1, which holds one-byte escape introducers), line and paragraph
/// separators, and the marks that reorder or hide text around them (Unicode bidirectional controls, zero-width characters, tags).
fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c,
            '\u{061c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{e0000}'..='\u{e007f}')
}

/// The text with each unsafe character shown as its escape, such as `\u{1b}`.
pub fn terminal(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) { safe.extend(c.escape_unicode()) } else { safe.push(c) }
    }
    Cow::Owned(safe)
}

/// Like [`terminal`], for fragprof's own text of several lines, such as an error with advice: line feeds stay.
pub fn lines(text: &str) -> Cow<'_, str> {
    if !text.chars().any(|c| c != '\n' && is_unsafe(c)) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.split('\n').map(terminal).collect::<Vec<_>>().join("\n"))
}

/// The text as one frame of a folded stack: `;` separates frames and a line is one stack, so `;` and line breaks are replaced.
pub fn folded(text: &str) -> Cow<'_, str> {
    let safe = terminal(text);
    if safe.contains(';') { Cow::Owned(safe.replace(';', ":")) } else { safe }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_and_line_breaks_become_visible() {
        assert_eq!(terminal("a\u{1b}[2Jb"), "a\\u{1b}[2Jb");
        assert_eq!(terminal("x\r\ny\u{9b}0m"), "x\\u{d}\\u{a}y\\u{9b}0m");
    }

    #[test]
    fn own_line_breaks_stay_where_they_are_meant() {
        assert_eq!(lines("what\x1b[1m\nwhat to do"), "what\\u{1b}[1m\nwhat to do");
        assert!(matches!(lines("a\nb"), Cow::Borrowed(_)));
    }

    #[test]
    fn text_that_would_reorder_its_line_becomes_visible() {
        assert_eq!(terminal("main\u{202e}lave"), "main\\u{202e}lave");
    }

    #[test]
    fn ordinary_names_stay_as_they_are() {
        let name = "std::vector<int, std::allocator<int> >::push_back(int const&) [größe]";
        assert!(matches!(terminal(name), Cow::Borrowed(same) if same == name));
    }

    #[test]
    fn a_semicolon_does_not_split_a_folded_frame() {
        assert_eq!(folded("f(';')\n"), "f(':')\\u{a}");
    }
}
