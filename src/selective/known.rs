//! The shipped table of known builds: `known.txt`, lines of `fragprof sites LIBC`.

use crate::selective::digest::Digest;
use crate::selective::store::{Entry, parse_entry};

const TABLE: &str = include_str!("known.txt");

/// The table's entry for a file.
pub(super) fn look_up(digest: &Digest) -> Option<Entry> {
    entries().find(|entry| entry.digest == *digest)
}

fn entries() -> impl Iterator<Item = Entry> {
    TABLE.lines().filter(|line| !line.starts_with('#')).filter_map(parse_entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_an_entry() {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(entries().count(), lines);
    }
}
