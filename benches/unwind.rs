//! Converts every ELF file under a directory (`/usr`, or the one given) to an unwind table and prints the speed, the sizes, and what was
//! refused: `cargo bench --bench unwind`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fragprof::unwind::elf::{Elf, Image as _};
use fragprof::unwind::{Error, Table, rows};

#[derive(Default)]
struct Sum {
    files: usize,
    rows_read: u64,
    rows: u64,
    unsupported: u64,
    table_bytes: u64,
    reading: Duration,
    converting: Duration,
    writing: Duration,
    refused: BTreeMap<String, usize>,
}

fn main() {
    // cargo passes --bench.
    let directory = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or_else(|| "/usr".into());
    let mut files = Vec::new();
    collect(Path::new(&directory), &mut files);
    let mut seen = std::collections::HashSet::new();
    let mut sum = Sum::default();
    for path in files {
        let Ok(file) = File::open(&path) else { continue };
        let Ok(metadata) = file.metadata() else { continue };
        if !seen.insert((metadata.dev(), metadata.ino())) {
            continue;
        }
        match convert(&file, &mut sum) {
            Ok(()) => sum.files += 1,
            Err(Error::NotElf) => {}
            Err(error) => *sum.refused.entry(error.to_string()).or_default() += 1,
        }
    }
    let million = |n: u64| n as f64 / 1e6;
    println!("{directory}: {} files with tables, {:.2} M rows read, {:.2} M kept", sum.files, million(sum.rows_read), million(sum.rows));
    println!("unsupported rows: {:.3} %", 100.0 * sum.unsupported as f64 / sum.rows_read.max(1) as f64);
    println!(
        "table bytes per row: {:.2} of those kept ({:.1} MB)",
        sum.table_bytes as f64 / sum.rows.max(1) as f64,
        million(sum.table_bytes)
    );
    println!(
        "on one core: {:.1} M rows/s converted, {:.1} M rows/s with table and copy; reading the sections took {:.1} s",
        million(sum.rows_read) / sum.converting.as_secs_f64(),
        million(sum.rows_read) / (sum.converting + sum.writing).as_secs_f64(),
        sum.reading.as_secs_f64()
    );
    for (reason, files) in sum.refused {
        println!("refused: {files} files: {reason}");
    }
}

fn convert(file: &File, sum: &mut Sum) -> Result<(), Error> {
    let mut magic = [0; 4];
    if file.read_at(0, &mut magic).is_err() || &magic != b"\x7fELF" {
        return Err(Error::NotElf);
    }
    let begun = Instant::now();
    let elf = Elf::parse(file)?;
    let section = elf.unwind_section()?;
    let precise = !elf.needs_libraries();
    sum.reading += begun.elapsed();
    let begun = Instant::now();
    let rows = rows::convert(&section, &elf.segments, precise, elf.machine)?;
    sum.converting += begun.elapsed();
    let begun = Instant::now();
    let table = Table::build(rows)?;
    std::hint::black_box(table.to_bytes());
    sum.writing += begun.elapsed();
    sum.rows_read += table.counts().rows_read;
    sum.unsupported += table.counts().rows_unsupported;
    sum.rows += table.rows().rows.len() as u64;
    sum.table_bytes += table.bytes() as u64;
    Ok(())
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() {
            collect(&entry.path(), files);
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
}
