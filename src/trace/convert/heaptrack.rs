//! heaptrack's data files, raw (src/track/libheaptrack.cpp) and interpreted (src/interpret/heaptrack_interpret.cpp), versions 1 to 3 of the
//! format: lines that begin with a letter, numbers in hexadecimal digits.
//!
//! ```text
//!     both          v VERSION FORMAT   X COMMAND   I PAGE PAGES   A (attached)   c MILLISECONDS   R PAGES   # COMMENT   t IP PARENT
//!     raw           x EXE   m NAME ADDRESS …   + SIZE TRACE ADDRESS   - ADDRESS
//!     interpreted   s STRING   i IP MODULE FUNCTION FILE LINE …   a SIZE TRACE   + ALLOCATION   - ALLOCATION
//! ```
//!
//! Since version 3 a text has its length in front. Traces and strings are numbered from 1, allocations (a size with a trace) from 0.

use std::collections::{BTreeMap, HashMap};
use std::io::{Read, Write};

use super::lines::{Lines, hex};
use super::{
    ConvertError, Converted, ENTRIES_MAX, Header, How, Input, NAME_BYTES_MAX, NAMED_FRAMES_MAX, Names, NamesWriter, Options, Output,
};
use crate::trace::NO_THREADS;

/// Versions of the format that are read.
const VERSIONS: std::ops::RangeInclusive<u64> = 1..=3;
/// Since this one a text has its length in front.
const SIZED: u64 = 3;
/// Frames of a stack that get names.
const FRAMES_MAX: usize = 256;
/// Modules at a time at most, and bytes of their paths.
const MODULES_MAX: usize = 1 << 12;
/// See [`MODULES_MAX`].
const PATH_BYTES_MAX: usize = 4096;
/// heaptrack does not tell threads: all calls are made by one.
const THREAD: u32 = 1;
const LACKS: [&str; 4] = [NO_THREADS, "alignments", "which blocks were to be zeros", "reallocs (they are a free and an allocation)"];
const LACKS_BLOCKS: &str = "which of the blocks of one stack and size is freed (the youngest is assumed)";

/// A node of the tree of stacks.
#[derive(Clone, Copy)]
struct Trace {
    ip: u64,
    parent: u32,
}

#[derive(Default)]
struct Parser {
    version: u64,
    comm: String,
    is_raw: bool,
    is_attached: bool,
    now_ns: u64,
    strings: Vec<String>,
    string_bytes: usize,
    /// By number of an instruction pointer: numbers of its functions' names, innermost first.
    ips: Vec<Vec<u32>>,
    /// Functions of all of them.
    inlined: usize,
    traces: Vec<Trace>,
    /// Size and trace.
    allocations: Vec<(u64, u32)>,
    /// Live blocks of each.
    blocks: HashMap<u32, Vec<u64>>,
    next_block: u64,
    /// Raw files: modules by address.
    modules: BTreeMap<u64, String>,
    libraries: Vec<String>,
}

/// Converts a data file of heaptrack.
pub(super) fn convert<W: Write, R: Read>(input: Input<R>, out: W, options: &Options) -> Result<Converted, ConvertError> {
    let mut lines = Lines::new(input);
    let mut parser = Parser::default();
    let mut sinks = (Some(out), None::<Output<W>>);
    let mut skipped = 0;
    while let Some(line) = lines.next()? {
        let Some((&kind, rest)) = line.split_first() else { continue };
        let rest = rest.strip_prefix(b" ").unwrap_or(rest);
        if matches!(kind, b'+' | b'-') {
            // All that the header of the trace tells comes before the first event.
            let output = match (&mut sinks.1, sinks.0.take()) {
                (Some(output), _) => output,
                (none, Some(out)) => none.insert(parser.begin(out, options)?),
                (None, None) => return Err(ConvertError::Invalid("it has no beginning")),
            };
            if !parser.event(kind, rest, output)? {
                skipped += 1;
            }
            continue;
        }
        let is_text = matches!(kind, b's' | b'm' | b'x') && parser.version >= SIZED;
        let length = if is_text { rest.split(|&byte| byte == b' ').next().and_then(hex) } else { None };
        let known = match length {
            // The letter, a space, the digits of the length, a space, the text.
            Some(length) => {
                let head = 3 + rest.iter().take_while(|&&byte| byte != b' ').count();
                let whole = lines.extend_to(length.saturating_add(head as u64))?;
                parser.other(kind, whole.get(head..).unwrap_or_default(), Some(length as usize))?
            }
            None => parser.other(kind, rest, None)?,
        };
        skipped += u64::from(!known);
    }
    let (out, begun) = sinks;
    let mut output = match (begun, out) {
        (Some(output), _) => output,
        (None, Some(out)) => parser.begin(out, options)?,
        (None, None) => return Err(ConvertError::Invalid("it has no beginning")),
    };
    output.skipped += skipped;
    let names = parser.names(&output.writer.stacks());
    let allocators = parser.allocators(options);
    let exited_ns = (!parser.is_attached).then_some(parser.now_ns);
    output.finish(&names, &allocators, exited_ns)
}

impl Parser {
    fn begin<W: Write>(&self, out: W, options: &Options) -> Result<Output<W>, ConvertError> {
        let header = Header { comm: self.comm.clone(), is_from_start: !self.is_attached, page_bytes: 4096, ..Header::default() };
        let (from, lacks) = match self.is_raw {
            true => ("a raw data file of heaptrack", LACKS.to_vec()),
            false => ("a data file of heaptrack", [&LACKS[..], &[LACKS_BLOCKS]].concat()),
        };
        let mut output = Output::new(out, header, from, &lacks, options)?;
        output.writer.without_seed("heaptrack's file does not have the heap from before it was attached");
        Ok(output)
    }

    /// An allocation or a free; false if it is not understood.
    fn event<W: Write>(&mut self, kind: u8, rest: &[u8], output: &mut Output<W>) -> Result<bool, ConvertError> {
        let mut fields = rest.split(|&byte| byte == b' ').map(hex);
        let (Some(Some(first)), second, third) = (fields.next(), fields.next().flatten(), fields.next().flatten()) else {
            return Ok(false);
        };
        let at = (THREAD, self.now_ns);
        if self.is_raw {
            match (kind, second, third) {
                (b'+', Some(trace), Some(addr)) => output.alloc(at, addr, trace, first, How::default())?,
                (b'-', None, None) => output.free(at, first)?,
                _ => return Ok(false),
            }
            return Ok(true);
        }
        let Some(index) = u32::try_from(first).ok().filter(|&index| (index as usize) < self.allocations.len()) else { return Ok(false) };
        let Some(&(size_bytes, trace)) = self.allocations.get(index as usize) else { return Ok(false) };
        match kind {
            b'+' => {
                self.next_block += 1;
                self.blocks.entry(index).or_default().push(self.next_block);
                output.alloc(at, self.next_block, trace.into(), size_bytes, How::default())?;
            }
            _ => {
                let Some(block) = self.blocks.get_mut(&index).and_then(Vec::pop) else { return Ok(false) };
                output.free(at, block)?;
            }
        }
        Ok(true)
    }

    /// Any other line; false if it is not understood. `length`: of the text at its beginning.
    fn other(&mut self, kind: u8, rest: &[u8], length: Option<usize>) -> Result<bool, ConvertError> {
        let mut fields = rest.split(|&byte| byte == b' ').map(hex);
        let mut number = || fields.next().flatten();
        let too_many = |entries: usize| match entries >= ENTRIES_MAX {
            true => Err(ConvertError::Invalid("it has too many strings or stacks")),
            false => Ok(()),
        };
        let (text, after) = rest.split_at(length.unwrap_or(rest.len()).min(rest.len()));
        match kind {
            b'v' => {
                number();
                self.version = number().unwrap_or(0);
                if !VERSIONS.contains(&self.version) {
                    return Err(ConvertError::Invalid("its version of heaptrack's format is not known"));
                }
            }
            b'X' => {
                let command = String::from_utf8_lossy(rest);
                let program = command.split(' ').next().unwrap_or("");
                self.comm = program.rsplit('/').next().unwrap_or("").chars().take(64).collect();
            }
            b'A' => self.is_attached = true,
            b'x' => self.is_raw = true,
            b'm' => {
                self.is_raw = true;
                self.module(text, after, length.is_some());
            }
            b's' => {
                too_many(self.strings.len())?;
                self.string_bytes += text.len();
                // Names beyond the limit are left out, not the stacks.
                let kept = if self.string_bytes <= 4 * NAME_BYTES_MAX { text } else { &[] };
                let string = String::from_utf8_lossy(kept).into_owned();
                self.library(&string);
                self.strings.push(string);
            }
            b'i' => {
                too_many(self.ips.len())?;
                let (ip, _module) = (number(), number());
                if ip.is_none() {
                    return Ok(false);
                }
                // Function, file and line of each inlined function, the innermost first.
                let numbers: Vec<u64> = std::iter::from_fn(number).take(3 * FRAMES_MAX).collect();
                let functions: Vec<u32> = numbers.chunks(3).filter_map(|frame| u32::try_from(*frame.first()?).ok()).collect();
                self.inlined += functions.len();
                too_many(self.inlined)?;
                self.ips.push(functions);
            }
            b't' => {
                too_many(self.traces.len())?;
                let (Some(ip), Some(parent)) = (number(), number()) else { return Ok(false) };
                // A parent comes before its children, so no walk is endless.
                let parent = u32::try_from(parent).ok().filter(|&parent| parent as usize <= self.traces.len());
                let Some(parent) = parent else { return Err(ConvertError::Invalid("a stack occurs before its caller")) };
                self.traces.push(Trace { ip, parent });
            }
            b'a' => {
                too_many(self.allocations.len())?;
                let (Some(size_bytes), Some(trace)) = (number(), number()) else { return Ok(false) };
                self.allocations.push((size_bytes, u32::try_from(trace).unwrap_or(0)));
            }
            b'c' => self.now_ns = number().map_or(self.now_ns, |ms| ms.saturating_mul(1_000_000)).max(self.now_ns).min(u64::MAX / 2),
            b'I' | b'R' | b'#' | b'S' => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// A module of a raw file: a name and its address; `-` forgets all.
    fn module(&mut self, text: &[u8], after: &[u8], is_sized: bool) {
        let (name, rest) = match is_sized {
            true => (text, after),
            false => text.split_at(text.iter().position(|&byte| byte == b' ').unwrap_or(text.len())),
        };
        if name == b"-" {
            return self.modules.clear();
        }
        let address = rest.split(|&byte| byte == b' ').find(|field| !field.is_empty()).and_then(hex);
        let name = String::from_utf8_lossy(name.get(..name.len().min(PATH_BYTES_MAX)).unwrap_or_default()).into_owned();
        self.library(&name);
        if let Some(address) = address.filter(|_| self.modules.len() < MODULES_MAX) {
            self.modules.insert(address, name);
        }
    }

    /// Notes a library among the loaded ones.
    fn library(&mut self, path: &str) {
        let is_new = path.contains(".so") && path.len() < PATH_BYTES_MAX && self.libraries.len() < MODULES_MAX;
        if is_new && !self.libraries.iter().any(|known| known == path) {
            self.libraries.push(path.to_owned());
        }
    }

    fn allocators(&self, options: &Options) -> Vec<String> {
        let of = |path: &String| Some(format!("{} in {path}", (options.allocator_of)(path.rsplit('/').next().unwrap_or(path))?));
        self.libraries.iter().filter_map(of).collect()
    }

    /// Names of the functions of some stacks, by the numbers of their traces.
    fn names(&self, traces: &[u64]) -> Names {
        let mut names = NamesWriter::default();
        let mut numbers: HashMap<String, u32> = HashMap::new();
        let (mut frames, mut bytes) = (0, 0);
        for &number in traces {
            let mut functions = Vec::new();
            let mut at = usize::try_from(number).unwrap_or(0);
            while let Some(trace) = at.checked_sub(1).and_then(|index| self.traces.get(index))
                && functions.len() < FRAMES_MAX
                && frames < NAMED_FRAMES_MAX
                && bytes < NAME_BYTES_MAX
            {
                for function in self.functions(trace.ip) {
                    let number = *numbers.entry(function).or_insert_with_key(|function| {
                        bytes += function.len();
                        names.function(function.clone())
                    });
                    functions.push(number);
                    frames += 1;
                }
                at = trace.parent as usize;
            }
            names.stack(&functions);
        }
        names.finish()
    }

    /// The functions at an instruction pointer, innermost first; of a raw file the module and the offset in it.
    fn functions(&self, ip: u64) -> Vec<String> {
        if self.is_raw {
            let module = self.modules.range(..=ip).next_back();
            return vec![module.map_or_else(
                || format!("{ip:#x}"),
                |(address, name)| format!("{}+{:#x}", name.rsplit('/').next().unwrap_or(name), ip - address),
            )];
        }
        let index = ip.checked_sub(1).and_then(|index| usize::try_from(index).ok());
        let functions = index.and_then(|index| self.ips.get(index)).map(Vec::as_slice).unwrap_or_default();
        let name =
            |&number: &u32| (number as usize).checked_sub(1).and_then(|index| self.strings.get(index)).filter(|name| !name.is_empty());
        functions.iter().filter_map(name).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::super::super::event::Op;
    use super::super::tests::{OPTIONS, converted};

    const INTERPRETED: &str = "v 10400 3\nX ./bin/shop --big\nI 1000 5e2922\ns 9 /bin/shop\ns 4 main\ns 4 load\ns 15 /lib/libjemalloc.so.2\n\
        i 55d0 1 2\ni 55d1 1 3 1 7 2 1 9\nt 1 0\nt 2 1\na 10 2\na 400 2\n+ 0\n+ 0\nc 5\n+ 1\nR 3b2\n- 0\n- 1\n- 1\nc a\n# strings: 3\n";

    fn sizes(events: &[(u32, u64, Op)]) -> Vec<(u64, Option<u64>)> {
        let of = |event: &(u32, u64, Op)| match event.2 {
            Op::Alloc(request) => (event.1, Some(request.size_bytes)),
            _ => (event.1, None),
        };
        events.iter().map(of).collect()
    }

    #[test]
    fn an_interpreted_file_has_stacks_times_and_the_youngest_block_freed() {
        let (header, events, names, done) = converted(INTERPRETED.as_bytes());
        assert_eq!((header.comm.as_str(), header.is_from_start, header.lacks.len()), ("shop", true, 5));
        let ms = 1_000_000;
        assert_eq!(sizes(&events), [(0, Some(16)), (0, Some(16)), (5 * ms, Some(1024)), (5 * ms, None), (5 * ms, None)]);
        assert_eq!((events[3].2, events[4].2), (Op::Free { block: 1 }, Op::Free { block: 2 }));
        // A free of a block that is not there is left out.
        assert_eq!((done.skipped, done.end.duration_ns, done.end.has_exited), (1, 10 * ms, true));
        assert_eq!(done.end.allocators, ["jemalloc in /lib/libjemalloc.so.2"]);
        // load is inlined into main, which main calls.
        assert_eq!((names.stacks(), names.functions_of(0).collect::<Vec<_>>()), (1, vec!["load", "main", "main"]));
    }

    #[test]
    fn a_raw_file_has_the_addresses_of_its_blocks() {
        let raw = "v 10400 3\nx 9 /bin/shop\nX shop\nm 1 -\nm 9 /bin/shop 5000 0 6c0\nm 9 libc.so.6 9000 0 1\nt 9010 0\nt 5020 1\n+ 20 2 c0\n\
                   + 30 1 d0\n- c0\n- e0\nc 3\nA\n";
        let (header, events, names, done) = converted(raw.as_bytes());
        assert!(header.converted_from.contains("raw") && header.lacks.len() == 4);
        let ops: Vec<Op> = events.iter().map(|event| event.2).collect();
        assert_eq!(ops[2..], [Op::Free { block: 0 }, Op::FreeUnknown { addr: 0xe0 }]);
        assert_eq!(names.functions, ["shop+0x20", "libc.so.6+0x10"]);
        assert_eq!(done.skipped, 0);
    }

    #[test]
    fn a_file_that_contradicts_itself_is_refused_and_one_that_is_cut_is_read_as_far_as_it_goes() {
        let refused = |text: &str| super::super::convert(text.as_bytes(), &mut Vec::new(), &OPTIONS).is_err();
        assert!(refused("v 1 9\n") && refused("v 1 3\nt 1 5\n"));
        for cut in 0..INTERPRETED.len() {
            let _ = super::super::convert(&INTERPRETED.as_bytes()[..cut], &mut Vec::new(), &OPTIONS);
        }
        let attached = converted(b"v 1 3\nA\nX p\nt 1 0\na 8 1\n+ 0\n");
        assert!(!attached.0.is_from_start && !attached.3.end.has_exited && !attached.3.end.no_seed.is_empty());
    }
}
