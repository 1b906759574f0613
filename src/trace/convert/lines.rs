//! Lines of text files, of bounded length.

use std::io::{self, BufRead, Read as _};

/// Longest line that is kept: of longer ones the rest is dropped.
pub(super) const LINE_BYTES_MAX: u64 = 1 << 20;

/// Reads lines, and counts those that were cut.
pub(super) struct Lines<R> {
    input: R,
    line: Vec<u8>,
}

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        Self { input, line: Vec::new() }
    }

    /// The next line without its end; `None` at the end of the file. A last line without an end was cut in the middle and is dropped.
    pub(super) fn next(&mut self) -> io::Result<Option<&[u8]>> {
        self.line.clear();
        if !self.more()? {
            return Ok(None);
        }
        Ok(Some(&self.line))
    }

    /// Appends the next line to the current one, with the end between them, until that has so many bytes: strings may contain ends of lines.
    pub(super) fn extend_to(&mut self, bytes: u64) -> io::Result<&[u8]> {
        while (self.line.len() as u64) < bytes.min(LINE_BYTES_MAX) {
            self.line.push(b'\n');
            if !self.more()? {
                break;
            }
        }
        Ok(&self.line)
    }

    fn more(&mut self) -> io::Result<bool> {
        let before = self.line.len();
        self.input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut self.line)?;
        if self.line.len() > before && self.line.last() != Some(&b'\n') {
            // Too long, or cut.
            let mut rest = Vec::new();
            loop {
                rest.clear();
                self.input.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut rest)?;
                match rest.last() {
                    None => return Ok(false),
                    Some(b'\n') => return Ok(true),
                    Some(_) => {}
                }
            }
        }
        let is_there = self.line.len() > before;
        if is_there {
            self.line.pop();
        }
        Ok(is_there)
    }
}

/// A number in hexadecimal digits, with or without `0x`.
pub(super) fn hex(text: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(text).ok()?;
    let digits = text.strip_prefix("0x").unwrap_or(text);
    // from_str_radix would accept a sign.
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(digits, 16).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn lines_are_bounded_and_a_cut_one_is_dropped() {
        let mut text = b"one\n\n".to_vec();
        text.extend(vec![b'x'; 3 << 20]);
        text.extend(b"\nlast\ncut");
        let mut lines = Lines::new(&text[..]);
        assert_eq!(lines.next().unwrap(), Some(&b"one"[..]));
        assert_eq!(lines.next().unwrap(), Some(&b""[..]));
        assert_eq!(lines.next().unwrap().map(<[u8]>::len), Some(1 << 20));
        assert_eq!(lines.next().unwrap(), Some(&b"last"[..]));
        assert_eq!(lines.next().unwrap(), None);
    }

    #[test]
    fn a_string_with_ends_of_lines_is_read_as_a_whole() {
        let mut lines = Lines::new(&b"s 5 a\nbcd\nnext\n"[..]);
        lines.next().unwrap();
        assert_eq!(lines.extend_to(9).unwrap(), b"s 5 a\nbcd");
        assert_eq!(lines.next().unwrap(), Some(&b"next"[..]));
    }

    #[test]
    fn numbers_are_hexadecimal_without_a_sign() {
        assert_eq!((hex(b"1f"), hex(b"0x10"), hex(b"+1"), hex(b""), hex(b"11111111111111111")), (Some(31), Some(16), None, None, None));
    }
}
