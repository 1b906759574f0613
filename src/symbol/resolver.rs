//! Frame words to frames, with a cache.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use super::elf::{ElfSymbols, FileSymbols, Found, OpenedFile, Symbol};
use super::space::{AddressSpace, Backing, Module, Region};
use super::vdso;
use crate::bpf::{FRAME_ADDRESS_MASK, FRAME_EXACT, FRAME_GUESSED, FRAME_JIT, FRAME_KIND_BIT, FRAME_SIGNAL, FrameKind};
use crate::frame::{Frame, FrameFlags, MODULE_JIT};

/// Name of a managed frame whose process ended, or got another image, before it could be named.
const UNNAMED_MANAGED: &str = "[managed code that was gone before it was named]";
/// Addresses whose frames are kept: about 200 bytes each. A large service's stacks touch some ten thousand.
pub const ADDRESSES_MAX: usize = 256 << 10;
/// Most modules whose opened file is cached. A process maps up to a few hundred.
pub const MODULES_MAX: usize = 16 << 10;

/// The symbolizer's counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    /// Frame words resolved.
    pub words: u64,
    /// Of these, looked up in a file because the cache did not have them.
    pub lookups: u64,
    /// Lookups that found no function.
    pub unnamed: u64,
    /// Times that a full cache was emptied.
    pub cache_resets: u64,
    /// Files that were closed to stay within the limits, and read again if needed.
    pub file_evictions: u64,
    /// Files that could no longer be opened, or that crashed their reader.
    pub unreadable_files: u64,
}

/// Resolves frames. Not shared between threads, but its results can be passed on ([`Known`]).
pub struct Symbolizer<S = ElfSymbols> {
    files: S,
    known: Known,
}

/// The results of a symbolizer. They outlive it and its thread.
#[derive(Debug, Default)]
pub struct Known {
    vdso: Option<Arc<Module>>,
    modules: HashMap<ModuleKey, Arc<OpenedModule>>,
    frames: HashMap<(ModuleKey, u64), Arc<[Frame]>>,
    /// Modules whose frames may have better names from then on.
    preliminary: HashMap<ModuleKey, Instant>,
    texts: HashMap<Box<str>, Arc<str>>,
    counters: Counters,
}

/// A module is identified by the address of its [`Module`]; the cache keeps it alive, so that the address is not reused meanwhile.
type ModuleKey = usize;

#[derive(Debug)]
struct OpenedModule {
    /// Keeps the key from being reused.
    module: Arc<Module>,
    name: Arc<str>,
    build_id: Arc<str>,
    file: Option<OpenedFile>,
}

impl Default for Symbolizer<ElfSymbols> {
    fn default() -> Self {
        Self::with_files(ElfSymbols::default(), Known::default())
    }
}

impl Symbolizer<ElfSymbols> {
    /// A symbolizer that reads ELF files.
    pub fn new() -> Self {
        Self::default()
    }

    /// A symbolizer that continues with the results of another one.
    pub fn with_known(known: Known) -> Self {
        Self::with_files(ElfSymbols::default(), known)
    }

    /// A symbolizer with these servers of debug information instead of the process's.
    #[cfg(test)]
    pub(super) fn with_debuginfod(debuginfod: Arc<super::debuginfod::Debuginfod>, known: Known) -> Self {
        Self::with_files(ElfSymbols::with_debuginfod(Some(debuginfod)), known)
    }

    /// Closes all files ([`Symbolizer::close_files`]) and returns the results kept.
    pub fn into_known(mut self) -> Known {
        self.close_files();
        self.known.counters = self.counters();
        self.known
    }

    /// Closes all files, and drops the entries of modules and texts without other references, and of modules whose file could not be opened, which
    /// are then retried, and names that were preliminary. Other resolved names are kept. For a symbolizer that is kept between uses: the parsed
    /// data of a file takes as much memory as the file.
    pub fn close_files(&mut self) {
        self.files.close();
        let now = Instant::now();
        let Known { modules, frames, preliminary, texts, .. } = &mut self.known;
        modules.retain(|_, opened| opened.file.is_some() && Arc::strong_count(&opened.module) > 1);
        frames.retain(|(key, _), _| modules.contains_key(key) && preliminary.get(key).is_none_or(|&until| until > now));
        preliminary.retain(|key, until| modules.contains_key(key) && *until > now);
        texts.retain(|_, text| Arc::strong_count(text) > 1);
    }

    /// The counters.
    pub fn counters(&self) -> Counters {
        let (before, broken) = (self.known.counters, self.files.broken.len() as u64);
        Counters {
            file_evictions: before.file_evictions + self.files.evictions,
            unreadable_files: before.unreadable_files + broken,
            ..before
        }
    }
}

impl<S: FileSymbols> Symbolizer<S> {
    fn with_files(files: S, known: Known) -> Self {
        Self { files, known }
    }

    /// The frames of a stack, leaf first: one for each word, and before it those of functions inlined there.
    pub fn stack(&mut self, space: &AddressSpace, words: &[u64]) -> Vec<Frame> {
        let mut frames = Vec::with_capacity(words.len() + words.len() / 2);
        for &word in words {
            frames.extend(self.frames(space, word).iter().cloned());
        }
        frames
    }

    /// The frames of one word: functions inlined there, innermost first, then the function itself. Never empty.
    ///
    /// A return address points after its call, perhaps into the next function or line: the byte before it is looked up.
    pub fn frames(&mut self, space: &AddressSpace, word: u64) -> Arc<[Frame]> {
        self.known.counters.words += 1;
        if word >> FRAME_KIND_BIT != FrameKind::Native as u64 {
            return space.named().get(word).unwrap_or_else(|| self.in_named(UNNAMED_MANAGED, MODULE_JIT, 0, true));
        }
        let address = word & FRAME_ADDRESS_MASK;
        let exact = word & (FRAME_EXACT | FRAME_SIGNAL) != 0;
        let address = if exact { address } else { address.saturating_sub(1) };
        let flags = FrameFlags { inlined: false, guessed: word & FRAME_GUESSED != 0, jit: false };
        let known = match space.find(address) {
            Some(region) => self.in_region(space, region, address, word & FRAME_JIT != 0),
            None => self.in_named("[unknown]", "", address, false),
        };
        if !flags.guessed {
            return known;
        }
        known.iter().map(|frame| Frame { flags: FrameFlags { guessed: true, ..frame.flags }, ..frame.clone() }).collect()
    }

    fn in_region(&mut self, space: &AddressSpace, region: &Region, address: u64, jit: bool) -> Arc<[Frame]> {
        match &region.backing {
            Backing::File(module) => {
                let module = module.clone();
                self.in_module(&module, (address - region.start).wrapping_add(region.offset), jit)
            }
            Backing::Vdso => match self.vdso_module() {
                Some(module) => self.in_module(&module, address - region.start, false),
                None => self.in_named("[vdso]", "[vdso]", address - region.start, false),
            },
            Backing::Anonymous => {
                let name = space.perf_map().and_then(|map| map.find(address));
                self.in_named(name.as_deref().unwrap_or("[jit]"), MODULE_JIT, address, true)
            }
            // Kernel-made regions such as [uprobes] and [vsyscall], and generated code in named anonymous memory.
            Backing::Named(name) => match space.perf_map().and_then(|map| map.find(address)) {
                Some(function) => self.in_named(&function, MODULE_JIT, address, true),
                None => {
                    let name = name.clone();
                    self.in_named(&name, &name, address, false)
                }
            },
        }
    }

    fn in_named(&mut self, function: &str, module: &str, address: u64, jit: bool) -> Arc<[Frame]> {
        let frame = Frame {
            module: self.text(module),
            address,
            flags: FrameFlags { jit, ..FrameFlags::default() },
            ..Frame::named(self.text(function))
        };
        Arc::new([frame])
    }

    fn in_module(&mut self, module: &Arc<Module>, offset: u64, jit: bool) -> Arc<[Frame]> {
        let key = Arc::as_ptr(module) as ModuleKey;
        if let Some(frames) = self.known.frames.get(&(key, offset)) {
            return frames.clone();
        }
        self.make_room();
        let opened = self.opened(key, module);
        self.known.counters.lookups += 1;
        let address = opened.file.as_ref().and_then(|file| file.address_of(offset));
        let Found { symbols, preliminary_until } = match (&opened.file, address) {
            (Some(file), Some(address)) => self.files.symbols(file, address),
            _ => Found::default(),
        };
        if let Some(until) = preliminary_until {
            let known = self.known.preliminary.entry(key).or_insert(until);
            *known = until.min(*known);
        }
        let address = address.unwrap_or(offset);
        let symbols = if symbols.is_empty() {
            self.known.counters.unnamed += 1;
            let name = opened.name.rsplit('/').next().unwrap_or_default();
            vec![Symbol { function: format!("[{name}+{address:#x}]"), ..Symbol::default() }]
        } else {
            symbols
        };
        let last = symbols.len() - 1;
        // Code in a file counts as generated only if the file has no symbol for it.
        let jit = jit && opened.file.is_none();
        let frames: Arc<[Frame]> = symbols
            .iter()
            .enumerate()
            .map(|(i, symbol)| Frame {
                function: self.text(&symbol.function),
                file: self.text(&symbol.file),
                line: symbol.line,
                module: opened.name.clone(),
                build_id: opened.build_id.clone(),
                address,
                flags: FrameFlags { inlined: i < last, guessed: false, jit },
            })
            .collect();
        self.known.frames.insert((key, offset), frames.clone());
        frames
    }

    /// Empties the caches when one is full: simpler than eviction, and rare because the limits are high.
    fn make_room(&mut self) {
        if self.known.frames.len() >= ADDRESSES_MAX || self.known.modules.len() >= MODULES_MAX {
            self.known.counters.cache_resets += 1;
            self.known.frames.clear();
            self.known.modules.clear();
            self.known.preliminary.clear();
            self.known.texts.clear();
        }
    }

    fn opened(&mut self, key: ModuleKey, module: &Arc<Module>) -> Arc<OpenedModule> {
        if let Some(opened) = self.known.modules.get(&key) {
            return opened.clone();
        }
        // The vDSO has none noted: all of its symbols are in it.
        let shown = (!module.build_id.is_empty()).then_some(module.path.as_str());
        let file = OpenedFile::open(&module.open_path, module.file.as_ref(), shown);
        self.known.counters.unreadable_files += u64::from(file.is_none());
        let build_id: String = module.build_id.iter().map(|byte| format!("{byte:02x}")).collect();
        let opened = Arc::new(OpenedModule {
            module: module.clone(),
            name: self.text(&super::capped(&module.path)),
            build_id: self.text(&build_id),
            file,
        });
        debug_assert_eq!(Arc::as_ptr(&opened.module) as ModuleKey, key);
        self.known.modules.insert(key, opened.clone());
        opened
    }

    fn vdso_module(&mut self) -> Option<Arc<Module>> {
        if self.known.vdso.is_none() {
            let file = vdso::image().ok()?;
            let open_path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
            let module = Module { path: "[vdso]".into(), open_path, file: Some(file), build_id: Vec::new() };
            self.known.vdso = Some(Arc::new(module));
        }
        self.known.vdso.clone()
    }

    /// One copy of each text.
    fn text(&mut self, text: &str) -> Arc<str> {
        if let Some(known) = self.known.texts.get(text) {
            return known.clone();
        }
        let shared: Arc<str> = text.into();
        // Texts of frames that are not cached by address (unknown and generated code) are bounded here.
        if self.known.texts.len() >= ADDRESSES_MAX {
            self.known.texts.clear();
        }
        self.known.texts.insert(text.into(), shared.clone());
        shared
    }
}
