//! The truth matrix: packaged programs, each with a ledger preloaded into the run that fragprof records, and the allocator's own
//! statistics. `make truth` runs all of it and writes docs/truth.md; six programs are in the normal suite.

mod columns;
mod compare;
pub mod ledger;
mod measure;
mod programs;
mod table;

use std::collections::VecDeque;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use columns::{Named, Tier};
use compare::Cell;
use measure::Prepared;
use programs::{PROGRAMS, Program};

use crate::support::bpf;
use crate::support::process::run;

/// Recordings of each program with each estimating tier.
const REPEATS: u32 = 5;

/// A measurement that failed as a whole becomes one cell.
fn or_wrong(column: &'static str, done: std::thread::Result<Result<Vec<Named>, String>>) -> Vec<Named> {
    let why = match done {
        Ok(Ok(cells)) => return cells,
        Ok(Err(why)) => why,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string)).unwrap_or_else(|| "it panicked".into())
        }
    };
    vec![(column, Cell::Wrong(why.chars().take(300).collect()))]
}

/// Which parts of the table are requested: all without `FRAGPROF_TRUTH_PARTS`, a list of `exact`, `governed`, `sampled`, `census`.
fn wants(part: &str) -> bool {
    std::env::var("FRAGPROF_TRUTH_PARTS").map_or(true, |parts| parts.split(',').any(|one| one == part))
}

fn row(program: &'static Program, repeats: u32) -> Vec<Named> {
    if !columns::is_installed(program.command[0]) {
        return vec![("processes", Cell::Wrong(format!("{} is not installed", program.command[0])))];
    }
    let prepared = match catch_unwind(AssertUnwindSafe(|| Prepared::new(program))) {
        Ok(Ok(prepared)) => prepared,
        Ok(Err(why)) => return vec![("processes", Cell::Wrong(why))],
        Err(panic) => return or_wrong("processes", Err(panic)),
    };
    let mut cells = Vec::new();
    let mut made = 0;
    cells.extend(or_wrong(
        "processes",
        catch_unwind(AssertUnwindSafe(|| {
            let (cells, blocks) = columns::recorded(&prepared)?;
            made = blocks;
            Ok(cells)
        })),
    ));
    if wants("census") {
        cells.extend(or_wrong("heaps", catch_unwind(AssertUnwindSafe(|| columns::census(&prepared, made)))));
    }
    for (part, column, tier) in [("governed", "governed allocations", Tier::Governed), ("sampled", "sampled allocations", Tier::Sampled)] {
        if wants(part) {
            cells.extend(or_wrong(column, catch_unwind(AssertUnwindSafe(|| Ok(columns::estimates(&prepared, tier, repeats))))));
        }
    }
    if !wants("exact") {
        let columns = table::TABLES[0].columns;
        cells.retain(|(column, _)| !columns.contains(column));
    }
    cells
}

/// Directory with the cells of earlier runs, one file per program.
fn store() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("truth-matrix")
}

/// Replaces the cells of a program in the store.
fn keep(program: &str, cells: &[Named]) {
    let path = store().join(program);
    let mut all = table::parse(&fs::read_to_string(&path).unwrap_or_default());
    for (column, cell) in cells {
        all.insert((program.to_owned(), (*column).to_owned()), cell.clone());
    }
    let text: String = all.iter().map(|((program, column), cell)| table::line(program, column, cell) + "\n").collect();
    fs::write(path, text).unwrap();
}

/// Writes the document from the whole store.
fn write_document() {
    let all: String = PROGRAMS.iter().filter_map(|program| fs::read_to_string(store().join(program.name)).ok()).collect();
    let names: Vec<(&str, &str)> = PROGRAMS.iter().map(|program| (program.name, program.what)).collect();
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let commit = run(Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(source)).out;
    let made = format!("Measured at {}.\n\n{}", commit.trim(), table::render(&table::parse(&all), &names));
    table::write(&source.join("docs/truth.md"), &made);
}

/// Measures the programs, two at a time, and returns a line for each wrong cell.
fn measure_all(programs: &[&'static Program], repeats: u32, workers: usize) -> Vec<String> {
    let waiting: Mutex<VecDeque<&'static Program>> = Mutex::new(programs.iter().copied().collect());
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(program) = waiting.lock().unwrap().pop_front() else { break };
                    let cells = row(program, repeats);
                    for (column, cell) in &cells {
                        let line = table::line(program.name, column, cell);
                        println!("{line}");
                        if matches!(cell, Cell::Wrong(_)) {
                            wrong.lock().unwrap().push(line);
                        }
                    }
                    if fs::create_dir_all(store()).is_ok() {
                        keep(program.name, &cells);
                    }
                }
            });
        }
    });
    wrong.into_inner().unwrap()
}

#[test]
#[ignore = "installs nothing, but needs what `make truth` installs, and half an hour"]
fn every_cell_equals_the_truth() {
    if bpf().is_none() {
        return;
    }
    let asked = std::env::var("PROGRAMS").unwrap_or_default();
    let names: Vec<&str> = asked.split([',', ' ']).filter(|name| !name.is_empty()).collect();
    let unknown: Vec<&&str> = names.iter().filter(|name| Program::named(name).is_none()).collect();
    assert!(unknown.is_empty(), "no such programs: {unknown:?}");
    let programs: Vec<&'static Program> = PROGRAMS.iter().filter(|one| names.is_empty() || names.contains(&one.name)).collect();
    let repeats = std::env::var("REPEATS").ok().and_then(|text| text.parse().ok()).unwrap_or(REPEATS);
    let wrong = measure_all(&programs, repeats, 2);
    write_document();
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn six_programs_are_recorded_and_counted_to_the_byte() {
    if bpf().is_none() {
        return;
    }
    let mut wrong = Vec::new();
    for name in ["bash", "gawk", "sqlite3", "python", "perl", "redis"] {
        let mut prepared = Prepared::new(Program::named(name).unwrap()).unwrap();
        prepared.shorten(10);
        let (mut cells, made) = columns::recorded(&prepared).unwrap();
        cells.extend(columns::census(&prepared, made).unwrap());
        wrong.extend(cells.iter().filter(|(_, cell)| matches!(cell, Cell::Wrong(_))).map(|(column, cell)| table::line(name, column, cell)));
    }
    assert!(wrong.is_empty(), "{} cells are wrong:\n{}", wrong.len(), wrong.join("\n"));
}
