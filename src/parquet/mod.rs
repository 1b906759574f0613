//! Writes tables as Parquet files (apache/parquet-format, README and `parquet.thrift`), for SQL engines. Pure, apart from the writer given.
//!
//! ```text
//! "PAR1"  row group (one page per column, zstd)…  metadata (thrift)  length of the metadata, u32  "PAR1"
//! ```
//!
//! Of the format it uses the least that every reader knows: flat columns that may be null, plain values, one data page of version 1 for each
//! column of a row group. Repetition is left to zstd. A row group is kept in memory until it is complete, so memory is bounded by its size.

mod thrift;

use std::io::{self, Write};

use thrift::{Struct, varint};

const MAGIC: &[u8; 4] = b"PAR1";
/// Rows of a row group.
const ROWS_MAX: usize = 50_000;
/// Bytes of a row group's values, before compression.
const GROUP_BYTES_MAX: usize = 16 << 20;
/// zstd's level.
const LEVEL: i32 = 3;

/// Numbers of `parquet.thrift`.
mod numbers {
    pub const VERSION: i32 = 1;
    pub const TYPE_INT64: i32 = 2;
    pub const TYPE_BYTE_ARRAY: i32 = 6;
    pub const OPTIONAL: i32 = 1;
    pub const CONVERTED_UTF8: i32 = 0;
    pub const CONVERTED_TIMESTAMP_MICROS: i32 = 10;
    pub const ENCODING_PLAIN: i32 = 0;
    pub const ENCODING_RLE: i32 = 3;
    pub const CODEC_ZSTD: i32 = 6;
    pub const PAGE_DATA: i32 = 0;
}

/// The type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// 64 bits with a sign.
    Integer,
    /// Microseconds since the Unix epoch, UTC.
    Timestamp,
    /// UTF-8.
    Text,
}

/// A column: its name and type. Every value may be null.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub of: Type,
    /// What it has, with its unit, for the schema's documentation.
    pub meaning: &'static str,
}

/// A value of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// Not known.
    Null,
    /// Of an integer column, or microseconds of a timestamp.
    Integer(i64),
    /// Of a text column.
    Text(&'a str),
}

impl<'a> From<Option<&'a str>> for Value<'a> {
    fn from(text: Option<&'a str>) -> Self {
        text.map_or(Self::Null, Self::Text)
    }
}

impl From<Option<u64>> for Value<'_> {
    /// What is beyond 64 bits with a sign is their largest number.
    fn from(number: Option<u64>) -> Self {
        number.map_or(Self::Null, |number| Self::Integer(i64::try_from(number).unwrap_or(i64::MAX)))
    }
}

/// The values of a column in the current row group.
#[derive(Debug, Default)]
struct Buffer {
    /// Runs of rows with and without a value: whether they have one, and their number.
    runs: Vec<(bool, u64)>,
    plain: Vec<u8>,
}

impl Buffer {
    fn add(&mut self, value: Value<'_>, of: Type) {
        let is_known = match (value, of) {
            (Value::Integer(number), Type::Integer | Type::Timestamp) => {
                self.plain.extend_from_slice(&number.to_le_bytes());
                true
            }
            (Value::Text(text), Type::Text) => {
                let length = u32::try_from(text.len()).unwrap_or(u32::MAX);
                self.plain.extend_from_slice(&length.to_le_bytes());
                self.plain.extend(text.as_bytes().iter().take(length as usize));
                true
            }
            _ => false,
        };
        match self.runs.last_mut() {
            Some((last, rows)) if *last == is_known => *rows += 1,
            _ => self.runs.push((is_known, 1)),
        }
    }

    /// The contents of a page: definition levels as runs, with their length before them, and the values.
    fn page(&self) -> io::Result<Vec<u8>> {
        let mut levels = Vec::new();
        for &(is_known, rows) in &self.runs {
            varint(&mut levels, rows << 1);
            levels.push(u8::from(is_known));
        }
        let length = u32::try_from(levels.len()).map_err(io::Error::other)?;
        Ok([&length.to_le_bytes(), levels.as_slice(), self.plain.as_slice()].concat())
    }
}

/// A file that is being written.
#[derive(Debug)]
pub struct Writer<'a, W: Write> {
    out: W,
    columns: &'a [Column],
    buffers: Vec<Buffer>,
    rows: usize,
    bytes: usize,
    written: u64,
    rows_total: u64,
    groups: Vec<Struct>,
}

impl<'a, W: Write> Writer<'a, W> {
    /// Begins a file.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn new(mut out: W, columns: &'a [Column]) -> io::Result<Self> {
        out.write_all(MAGIC)?;
        let buffers = columns.iter().map(|_| Buffer::default()).collect();
        Ok(Self { out, columns, buffers, rows: 0, bytes: 0, written: MAGIC.len() as u64, rows_total: 0, groups: Vec::new() })
    }

    /// Adds a row: a value for each column. One that is missing, or of another type than its column, is null.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn row(&mut self, values: &[Value<'_>]) -> io::Result<()> {
        for (index, (column, buffer)) in self.columns.iter().zip(&mut self.buffers).enumerate() {
            let before = buffer.plain.len();
            buffer.add(values.get(index).copied().unwrap_or(Value::Null), column.of);
            self.bytes += buffer.plain.len() - before;
        }
        self.rows += 1;
        if self.rows >= ROWS_MAX || self.bytes >= GROUP_BYTES_MAX { self.group() } else { Ok(()) }
    }

    /// Writes the current row group.
    fn group(&mut self) -> io::Result<()> {
        if self.rows == 0 {
            return Ok(());
        }
        let begin = self.written;
        let rows = self.rows as i64;
        let mut chunks = Vec::with_capacity(self.columns.len());
        let mut bytes_total = 0;
        for (column, buffer) in self.columns.iter().zip(&mut self.buffers) {
            let page = std::mem::take(buffer).page()?;
            let packed = zstd::bulk::compress(&page, LEVEL)?;
            let size = |bytes: &[u8]| i32::try_from(bytes.len()).map_err(io::Error::other);
            let data = Struct::default()
                .i32(1, i32::try_from(self.rows).map_err(io::Error::other)?)
                .i32(2, numbers::ENCODING_PLAIN)
                .i32(3, numbers::ENCODING_RLE)
                .i32(4, numbers::ENCODING_RLE);
            let head = Struct::default().i32(1, numbers::PAGE_DATA).i32(2, size(&page)?).i32(3, size(&packed)?).structure(5, data).finish();
            let offset = self.written as i64;
            let (plain_bytes, packed_bytes) = ((head.len() + page.len()) as i64, (head.len() + packed.len()) as i64);
            self.out.write_all(&head)?;
            self.out.write_all(&packed)?;
            self.written += packed_bytes as u64;
            bytes_total += plain_bytes;
            let metadata = Struct::default()
                .i32(1, physical(column.of))
                .i32s(2, &[numbers::ENCODING_PLAIN, numbers::ENCODING_RLE])
                .texts(3, &[column.name])
                .i32(4, numbers::CODEC_ZSTD)
                .i64(5, rows)
                .i64(6, plain_bytes)
                .i64(7, packed_bytes)
                .i64(9, offset);
            chunks.push(Struct::default().i64(2, offset).structure(3, metadata));
        }
        let group = Struct::default().structures(1, chunks).i64(2, bytes_total).i64(3, rows).i64(5, begin as i64);
        self.groups.push(group);
        self.rows_total += self.rows as u64;
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }

    /// Ends the file; returns its number of rows.
    ///
    /// # Errors
    /// What the writer reports.
    pub fn finish(mut self) -> io::Result<u64> {
        self.group()?;
        let root = Struct::default().text(4, "schema").i32(5, i32::try_from(self.columns.len()).map_err(io::Error::other)?);
        let schema = std::iter::once(root).chain(self.columns.iter().map(element)).collect();
        let metadata = Struct::default()
            .i32(1, numbers::VERSION)
            .structures(2, schema)
            .i64(3, self.rows_total as i64)
            .structures(4, self.groups)
            .text(6, concat!("fragprof version ", env!("CARGO_PKG_VERSION")))
            .finish();
        self.out.write_all(&metadata)?;
        self.out.write_all(&u32::try_from(metadata.len()).map_err(io::Error::other)?.to_le_bytes())?;
        self.out.write_all(MAGIC)?;
        self.out.flush()?;
        Ok(self.rows_total)
    }
}

fn physical(of: Type) -> i32 {
    if of == Type::Text { numbers::TYPE_BYTE_ARRAY } else { numbers::TYPE_INT64 }
}

/// `SchemaElement`: with the older `converted_type` and the newer `logicalType`, as readers know one or the other.
fn element(column: &Column) -> Struct {
    let plain = Struct::default().i32(1, physical(column.of)).i32(3, numbers::OPTIONAL).text(4, column.name);
    match column.of {
        Type::Integer => plain,
        Type::Text => plain.i32(6, numbers::CONVERTED_UTF8).structure(10, Struct::default().structure(1, Struct::default())),
        Type::Timestamp => {
            let micros = Struct::default().structure(2, Struct::default());
            let timestamp = Struct::default().bool(1, true).structure(2, micros);
            plain.i32(6, numbers::CONVERTED_TIMESTAMP_MICROS).structure(10, Struct::default().structure(8, timestamp))
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const COLUMNS: [Column; 2] =
        [Column { name: "at", of: Type::Timestamp, meaning: "" }, Column { name: "text", of: Type::Text, meaning: "" }];

    #[test]
    fn a_file_has_its_magic_at_both_ends_and_the_length_of_its_metadata() {
        let mut file = Vec::new();
        let mut writer = Writer::new(&mut file, &COLUMNS).unwrap();
        for number in 0..ROWS_MAX as i64 + 1 {
            writer.row(&[Value::Integer(number), Value::Text("x")]).unwrap();
        }
        assert_eq!(writer.groups.len(), 1);
        assert_eq!(writer.finish().unwrap(), ROWS_MAX as u64 + 1);
        let end = file.len() - 8;
        let length = u32::from_le_bytes(file[end..end + 4].try_into().unwrap()) as usize;
        assert!(file.starts_with(MAGIC) && file.ends_with(MAGIC) && length < end - 4);
        // The first field of the metadata: an i32 with the version.
        assert_eq!(file[end - length..end - length + 2], [0x15, 2]);
    }

    #[test]
    fn a_value_of_another_type_is_null() {
        let mut buffer = Buffer::default();
        buffer.add(Value::Integer(1), Type::Text);
        buffer.add(Value::Null, Type::Text);
        buffer.add(Value::Text("ab"), Type::Text);
        assert_eq!(buffer.runs, [(false, 2), (true, 1)]);
        assert_eq!(buffer.page().unwrap(), [4, 0, 0, 0, 4, 0, 2, 1, 2, 0, 0, 0, b'a', b'b']);
    }
}
