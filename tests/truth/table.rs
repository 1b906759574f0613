//! The cells as lines of a store, and as the tables of docs/truth.md.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use super::compare::{Cell, covered};

/// The generated part of docs/truth.md is between these two lines.
const BEGIN: &str = "<!-- make truth writes from here -->\n";
const END: &str = "<!-- to here -->\n";

/// Cells by program and column.
pub type Cells = BTreeMap<(String, String), Cell>;

/// A table: its heading, and its columns.
pub struct Table {
    /// Heading.
    pub title: &'static str,
    /// Columns, by their names in [`Cells`].
    pub columns: &'static [&'static str],
}

/// Every table of the document, in order.
pub const TABLES: &[Table] = &[
    Table { title: "Every call recorded", columns: &["processes", "allocations", "bytes", "live blocks", "live bytes", "peak", "losses"] },
    Table { title: "Windows", columns: &["governed allocations", "governed bytes"] },
    Table { title: "Sampled in the process", columns: &["sampled allocations", "sampled bytes", "sampled live bytes"] },
    Table { title: "Census", columns: &["heaps", "blocks", "live", "in use", "extent", "trimmed"] },
    Table { title: "Verdicts", columns: &["owner's answer", "verdict"] },
];

fn one_line(text: &str) -> String {
    let text: String = text.chars().map(|c| if c.is_whitespace() { ' ' } else { c }).collect();
    text.replace('|', "/")
}

/// A cell as a line of the store.
pub fn line(program: &str, column: &str, cell: &Cell) -> String {
    format!("@@cell\t{program}\t{column}\t{}\t{}", cell.mark(), one_line(cell.text()))
}

/// Parses the cells of a store, or of a log.
pub fn parse(text: &str) -> Cells {
    let mut cells = Cells::new();
    for line in text.lines().filter_map(|line| line.split_once("@@cell\t").map(|(_, rest)| rest)) {
        if let [program, column, mark, text] = line.splitn(4, '\t').collect::<Vec<_>>()[..] {
            cells.insert((program.into(), column.into()), Cell::parse(mark, text));
        }
    }
    cells
}

/// Number of intervals of a column that cover the truth, of all recordings of all programs.
fn share(cells: &Cells, column: &str) -> Option<(u32, u32)> {
    let of = cells.iter().filter(|((_, name), _)| name == column).filter_map(|(_, cell)| covered(cell.text()));
    of.reduce(|sum, one| (sum.0 + one.0, sum.1 + one.1))
}

/// The generated part of the document: the tables, then the wrong cells. `names`: programs with a description, in order.
pub fn render(cells: &Cells, names: &[(&str, &str)]) -> String {
    let mut text = String::new();
    for table in TABLES {
        let has_row = |name: &str| table.columns.iter().any(|column| cells.contains_key(&(name.to_owned(), (*column).to_owned())));
        let rows: Vec<&(&str, &str)> = names.iter().filter(|(name, _)| has_row(name)).collect();
        if rows.is_empty() {
            continue;
        }
        writeln!(text, "## {}\n\n| | | {} |", table.title, table.columns.join(" | ")).unwrap();
        writeln!(text, "|{}", "---|".repeat(table.columns.len() + 2)).unwrap();
        for (name, what) in rows {
            write!(text, "| {name} | {what} |").unwrap();
            for column in table.columns {
                let cell = cells.get(&((*name).to_owned(), (*column).to_owned()));
                match cell {
                    Some(Cell::Good(said)) => write!(text, " {said} |"),
                    Some(Cell::None(said)) => write!(text, " – {said} |"),
                    Some(Cell::Wrong(said)) => write!(text, " **wrong**: {said} |"),
                    None => write!(text, " |"),
                }
                .unwrap();
            }
            text.push('\n');
        }
        for column in table.columns {
            if let Some((inside, all)) = share(cells, column) {
                let hundred = 100.0 * f64::from(inside) / f64::from(all.max(1));
                writeln!(text, "\n{column}: {inside} of {all} intervals cover the truth, {hundred:.0} of 100 (goal: 93).").unwrap();
            }
        }
        text.push('\n');
    }
    let wrong = cells.values().filter(|cell| matches!(cell, Cell::Wrong(_))).count();
    writeln!(text, "{wrong} of {} cells are wrong.", cells.len()).unwrap();
    text
}

/// Writes the generated part into the document.
pub fn write(document: &Path, made: &str) {
    let text = fs::read_to_string(document).expect("the document can be read");
    let (head, rest) = text.split_once(BEGIN).expect("the document has the line before the tables");
    let (_, tail) = rest.split_once(END).expect("the document has the line after the tables");
    fs::write(document, format!("{head}{BEGIN}{made}{END}{tail}")).expect("the document can be written");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells() -> Cells {
        let lines = [
            line("perl", "bytes", &Cell::Good("12".into())),
            line("perl", "governed bytes", &Cell::Wrong("1 of 5: 0.31 ± 0.01".into())),
            line("gawk", "governed bytes", &Cell::Good("5 of 5: 0.98 ± 0.04".into())),
            line("gawk", "bytes", &Cell::Wrong("no\nprofile | at all".into())),
        ];
        parse(&lines.join("\n"))
    }

    #[test]
    fn a_store_is_parsed_as_it_was_written() {
        let cells = cells();
        assert_eq!(cells.len(), 4);
        assert_eq!(cells[&("perl".to_owned(), "bytes".to_owned())], Cell::Good("12".into()));
        assert_eq!(cells[&("gawk".to_owned(), "bytes".to_owned())], Cell::Wrong("no profile / at all".into()));
    }

    #[test]
    fn the_document_has_rows_in_the_programs_order_shares_and_wrong_cells() {
        let text = render(&cells(), &[("perl", "C"), ("gawk", "C"), ("ruby", "C")]);
        assert!(text.contains("| perl | C | | | 12 |") || text.contains("| perl | C | | | 12 | | | | |"), "{text}");
        assert!(text.contains("governed bytes: 6 of 10 intervals cover the truth, 60 of 100 (goal: 93)."), "{text}");
        assert!(text.contains("| **wrong**: 1 of 5: 0.31 ± 0.01 |"), "{text}");
        assert!(text.ends_with("2 of 4 cells are wrong.\n"), "{text}");
        assert!(text.find("| perl").unwrap() < text.find("| gawk").unwrap() && !text.contains("ruby"));
    }
}
