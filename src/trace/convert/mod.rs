//! Traces from the files of other tools.
//!
//! | file | written by | does not tell |
//! |---|---|---|
//! | heaptrack, raw | `heaptrack --raw` | threads, alignments, zeroed blocks, reallocs (a free and an allocation) |
//! | heaptrack | `heaptrack`, after its interpreter | the same, and which of the blocks of one stack and size is freed |
//! | records of glibc's tracer | glibc-malloc-trace-utils, `libmtrace.so` | times, stacks |
//! | workload of glibc's simulator | `trace2wl`, for `trace_run` | times, stacks, the order of threads between their synchronisations |
//! | text of `mtrace(3)` | glibc | times, threads, alignments, zeroed blocks, the heap from before |
//!
//! Files may be compressed with gzip or zstd. They come from anywhere: what is read of them is bounded, and what is not understood is
//! refused or counted.

mod glibc;
mod heaptrack;
mod lines;

use std::io::{self, BufReader, Chain, Cursor, Read, Write};

use thiserror::Error;

use super::{End, Header, How, Names, NamesWriter, Writer};

/// Live blocks at a time, and stacks, strings or callers, at most: some GiB in memory.
const ENTRIES_MAX: usize = 1 << 25;
/// Functions of all stacks together at most, so that the names fit into a chunk.
const NAMED_FRAMES_MAX: usize = 3 << 20;
/// Bytes of the functions' names at most.
const NAME_BYTES_MAX: usize = 16 << 20;
/// Bytes of a file that is read as a whole at most.
const WHOLE_BYTES_MAX: u64 = 256 << 20;
/// Bytes by which a file is recognised.
const FIRST_BYTES: u64 = 64;

/// How a file is converted.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// No event is written once the trace has so many bytes.
    pub bytes_max: u64,
    /// Name of the allocator whose library has a file name without directories.
    pub allocator_of: fn(&str) -> Option<&'static str>,
}

/// What became of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Converted {
    /// What it is.
    pub from: &'static str,
    /// What it does not tell.
    pub lacks: Vec<String>,
    /// What the trace contains.
    pub end: End,
    /// Bytes of the trace.
    pub bytes: u64,
    /// Lines or records that were not understood, and left out.
    pub skipped: u64,
}

/// Why a file cannot be converted.
#[derive(Debug, Error)]
pub enum ConvertError {
    /// The file cannot be read, or the trace not written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is of no known kind.
    #[error(
        "it is neither a data file of heaptrack nor a trace of glibc (records of its tracer, a workload for trace_run, the text of mtrace)"
    )]
    Unknown,
    /// It is damaged, or beyond what is read.
    #[error("{0}")]
    Invalid(&'static str),
}

/// The file from its first byte on.
type Input<R> = BufReader<Chain<Cursor<Vec<u8>>, R>>;

/// Converts a file.
///
/// # Errors
/// If it is of no known kind, damaged, too large, or if either stream refuses.
pub fn convert<W: Write>(mut input: impl Read, out: W, options: &Options) -> Result<Converted, ConvertError> {
    let first = first_bytes(&mut input)?;
    let whole = Cursor::new(first.clone()).chain(input);
    match first.as_slice() {
        [0x1f, 0x8b, ..] => plain(flate2::read::MultiGzDecoder::new(whole), out, options),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => plain(zstd::stream::read::Decoder::new(whole)?, out, options),
        _ => plain(whole, out, options),
    }
}

/// Converts a file that is not compressed.
fn plain<W: Write>(mut input: impl Read, out: W, options: &Options) -> Result<Converted, ConvertError> {
    let first = first_bytes(&mut input)?;
    let kind = match first.as_slice() {
        [b'v', b' ', ..] => heaptrack::convert::<W, _>,
        [b'=' | b'@' | b'+' | b'-', b' ', ..] => glibc::text::<W, _>,
        first if glibc::is_records(first) => glibc::records::<W, _>,
        first if glibc::is_workload(first) => glibc::workload::<W, _>,
        _ => return Err(ConvertError::Unknown),
    };
    kind(BufReader::new(Cursor::new(first).chain(input)), out, options)
}

fn first_bytes(input: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut first = Vec::new();
    input.by_ref().take(FIRST_BYTES).read_to_end(&mut first)?;
    Ok(first)
}

/// A trace that is written from a file of another tool.
struct Output<W: Write> {
    writer: Writer<W>,
    from: &'static str,
    lacks: Vec<String>,
    skipped: u64,
}

impl<W: Write> Output<W> {
    fn new(out: W, header: Header, from: &'static str, lacks: &[&str], options: &Options) -> io::Result<Self> {
        let lacks: Vec<String> = lacks.iter().map(ToString::to_string).collect();
        let header = Header {
            tool: format!("fragprof {}", env!("CARGO_PKG_VERSION")),
            converted_from: from.to_owned(),
            lacks: lacks.clone(),
            ..header
        };
        Ok(Self { writer: Writer::new(out, &header, options.bytes_max)?, from, lacks, skipped: 0 })
    }

    fn alloc(&mut self, at: (u32, u64), addr: u64, stack: u64, size_bytes: u64, how: How) -> Result<(), ConvertError> {
        if self.writer.live() >= ENTRIES_MAX {
            return Err(ConvertError::Invalid("it has too many live blocks at a time"));
        }
        Ok(self.writer.alloc(at, addr, stack, size_bytes, how)?)
    }

    fn free(&mut self, at: (u32, u64), addr: u64) -> Result<(), ConvertError> {
        Ok(self.writer.free(at, addr)?)
    }

    /// A realloc. `new`: `None` if it failed.
    fn realloc(&mut self, at: (u32, u64), old: u64, new: Option<u64>, (stack, size_bytes): (u64, u64)) -> Result<(), ConvertError> {
        match (old, new) {
            (0, None) => Ok(()),
            (0, Some(new)) => self.alloc(at, new, stack, size_bytes, How::default()),
            // realloc(block, 0) frees.
            (old, None) if size_bytes == 0 => self.free(at, old),
            (_, None) => Ok(()),
            (old, Some(new)) => {
                self.writer.realloc_free(at, old)?;
                self.alloc(at, new, stack, size_bytes, How::default())
            }
        }
    }

    fn finish(mut self, names: &Names, allocators: &[String], exited_ns: Option<u64>) -> Result<Converted, ConvertError> {
        if let Some(exited_ns) = exited_ns {
            self.writer.exited(exited_ns);
        }
        let Self { writer, from, lacks, skipped, .. } = self;
        let (end, bytes) = writer.finish(names, allocators)?;
        Ok(Converted { from, lacks, end, bytes, skipped })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::event::Op;
    use super::super::read::{Item, Reader};
    use super::*;

    pub(super) const OPTIONS: Options =
        Options { bytes_max: u64::MAX, allocator_of: |name| name.starts_with("libjemalloc").then_some("jemalloc") };

    /// The trace's header, events, names and end, and what was said of the file.
    pub(super) fn converted(bytes: &[u8]) -> (Header, Vec<(u32, u64, Op)>, Names, Converted) {
        let mut out = Vec::new();
        let done = convert(bytes, &mut out, &OPTIONS).unwrap();
        let mut reader = Reader::new(&out[..]).unwrap();
        let (mut events, mut names) = (Vec::new(), Names::default());
        while let Some(item) = reader.next_item().unwrap() {
            match item {
                Item::Event(event) => events.push((event.thread, event.time_ns, event.op)),
                Item::Names(found) => names = found,
                _ => {}
            }
        }
        (reader.header().clone(), events, names, done)
    }

    #[test]
    fn what_is_of_no_known_kind_is_refused() {
        for bytes in [&b""[..], b"\x7fELF", b"FPTRACE\x02", b"hello\n", &[0; 200]] {
            assert!(matches!(convert(bytes, &mut Vec::new(), &OPTIONS), Err(ConvertError::Unknown)), "{bytes:?}");
        }
        // Compressed, and cut.
        assert!(convert(&[0x1f, 0x8b, 8][..], &mut Vec::new(), &OPTIONS).is_err());
        assert!(convert(&[0x28, 0xb5, 0x2f, 0xfd, 9][..], &mut Vec::new(), &OPTIONS).is_err());
    }
}
