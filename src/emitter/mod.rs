//! Emitters in a process: files whose code reports sampled allocations itself, by the probes `alloc(pointer, bytes, weight)` and
//! `free(pointer)` of the providers `otel_memory` (OpenTelemetry eBPF profiler, design document 00003) and `ddheap`.
//!
//! Any mapped file may be one: fragprof's own preload library, an allocator, a language runtime, the program itself. A file that has only
//! one of the two probes is not an emitter: without frees the live blocks are not known.

pub mod passed;
pub mod usdt;

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::emitter::passed::{PassedFile, PassedSite};
use crate::emitter::usdt::Probe;
use crate::probe::placement::Emulation;
use crate::process::elf::{Elf, ReadAt};
use crate::process::file::{FileIdentity, MappedFile};
use crate::process::handle::{Process, ProcessError};
use crate::units::HumanBytes;

/// The providers, the specified one first.
pub const PROVIDERS: [&str; 2] = ["otel_memory", "ddheap"];
/// Maximum number of files examined per process, as in `allocator::detect`.
const FILES_MAX: usize = 4096;
/// Maximum number of files whose probes are cached. Nearly all have none: 200 bytes each.
const KNOWN_FILES_MAX: usize = 16_384;
/// Maximum number of refusals reported per file.
const REFUSED_SHOWN_MAX: usize = 4;
/// Symbol of the sampler's statistics, and their first word (src/sampler/preload/sample.h).
const STATS_SYMBOL: &[u8] = b"fragprof_sampler_stats";
const STATS_MAGIC: u32 = 0x3153_5046;
/// Number of bytes that are read of them, and the number that the first versions of the library had.
const STATS_BYTES: usize = 96;
const STATS_BYTES_MIN: usize = 56;
/// The five-byte `nop` (Intel SDM, `NOP`).
const LONG_NOP: [u8; 5] = [0x0f, 0x1f, 0x44, 0x00, 0x00];

/// Number of `alloc` arguments in the specification.
const ALLOC_ARGUMENTS: usize = 3;
/// Number of `free` arguments in the specification.
const FREE_ARGUMENTS: usize = 1;

/// Statistics that fragprof's own sampler publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SamplerStats {
    /// Sample distance while samples are not too frequent, on average over call sites, bytes.
    pub sample_bytes: u64,
    /// Whether the program's malloc calls reach it. Not set before the library has started.
    pub in_front: bool,
    /// Samples reported so far.
    pub samples: u64,
    /// The samples reported as freed immediately because the set of live samples was full.
    pub overflows: u64,
    /// Samples per second and CPU above which the distance is lengthened; 0 = it never is.
    pub samples_per_second: u64,
    /// Samples that were drawn with a distance that the limit had lengthened.
    pub lengthened: u64,
    /// The longest of these distances, bytes; 0 = none was lengthened.
    pub longest_sample_bytes: u64,
}

impl SamplerStats {
    /// A description of the mean sample distance.
    pub fn distance(&self) -> String {
        let may_grow = self.samples_per_second != 0 && self.sample_bytes > 1;
        format!("{}{}", HumanBytes(self.sample_bytes), if may_grow { " or more" } else { "" })
    }
}

/// An emitter in a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Emitter {
    /// `otel_memory` or `ddheap`.
    pub provider: &'static str,
    /// The path below the process's root directory, for display.
    pub display_path: PathBuf,
    /// Identity of the file.
    pub identity: FileIdentity,
    /// The sites.
    pub sites: PassedFile,
    /// The library's statistics, if it is fragprof's.
    pub stats: Option<SamplerStats>,
    /// Where they are in the process.
    pub stats_address: Option<u64>,
}

impl Emitter {
    /// A description, such as `otel_memory in libfragprof_sampler.so`.
    pub fn describe(&self) -> String {
        let name = self.display_path.file_name().map_or_else(|| self.display_path.to_string_lossy(), |name| name.to_string_lossy());
        format!("{} in {name}", self.provider)
    }

    /// Whether it sees the program's allocations. A sampler that another malloc interposes sees none.
    pub fn hears(&self) -> bool {
        self.stats.is_none_or(|stats| stats.in_front)
    }

    /// The same at present; `None` = the process has ended, or does not have it any more.
    pub fn hears_now(&self, process: &Process) -> Option<bool> {
        let Some(address) = self.stats_address else { return Some(true) };
        stats_at(&process.directory().join("mem"), address).map(|stats| stats.in_front)
    }
}

/// What was found in a process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Emitters {
    /// By ascending address of their files. A process may have several.
    pub emitters: Vec<Emitter>,
    /// Probes that exist but cannot be used, with the reason, as sentences.
    pub refused: Vec<String>,
}

/// The probes of one file, wherever it is mapped.
#[derive(Debug, Default)]
struct FileProbes {
    /// By provider.
    sites: Vec<(&'static str, Vec<PassedSite>, Vec<PassedSite>)>,
    refused: Vec<String>,
    /// Virtual address of the sampler's statistics.
    stats_vaddr: Option<u64>,
}

/// Searches for emitters, and caches the results by file.
#[derive(Debug)]
pub struct Finder {
    emulation: Emulation,
    known: HashMap<FileIdentity, Arc<FileProbes>>,
}

impl Finder {
    /// For a kernel with this emulation.
    pub fn new(emulation: Emulation) -> Self {
        Self { emulation, known: HashMap::new() }
    }

    /// Examines every executable file of a process.
    ///
    /// # Errors
    /// If its mappings cannot be read. Files that cannot be opened count as having no probes; the search for allocators reports them.
    pub fn find(&mut self, process: &Process) -> Result<Emitters, ProcessError> {
        let maps = process.maps()?;
        let mut found = Emitters::default();
        let mut seen = HashSet::new();
        for mapping in maps.executable_files().filter(|m| seen.insert((m.device, m.inode))).take(FILES_MAX) {
            let Ok(file) = MappedFile::open(process, mapping) else { continue };
            let probes = self.probes_of(&file);
            if probes.sites.is_empty() && probes.refused.is_empty() {
                continue;
            }
            found.refused.extend(probes.refused.iter().map(|reason| format!("{}: {reason}", file.display_path.display())));
            let bias = file.elf.load_bias(mapping.start.0, mapping.offset);
            let stats_address = probes.stats_vaddr.and_then(|vaddr| Some(bias?.wrapping_add(vaddr)));
            let stats = stats_address.and_then(|address| stats_at(&process.directory().join("mem"), address));
            for (provider, allocs, frees) in &probes.sites {
                found.emitters.push(Emitter {
                    provider,
                    display_path: file.display_path.clone(),
                    identity: file.identity.clone(),
                    sites: PassedFile { path: file.attach_path.clone(), allocs: allocs.clone(), frees: frees.clone() },
                    stats,
                    stats_address,
                });
            }
        }
        Ok(found)
    }

    fn probes_of(&mut self, file: &MappedFile) -> Arc<FileProbes> {
        if let Some(probes) = self.known.get(&file.identity) {
            return Arc::clone(probes);
        }
        let probes = Arc::new(file_probes(&file.elf, self.emulation));
        if self.known.len() >= KNOWN_FILES_MAX {
            self.known.clear();
        }
        self.known.insert(file.identity.clone(), Arc::clone(&probes));
        probes
    }
}

/// The emitters of a file.
fn file_probes<R: ReadAt>(elf: &Elf<R>, emulation: Emulation) -> FileProbes {
    let found = usdt::probes(elf, &PROVIDERS);
    let mut probes = FileProbes::default();
    probes.stats_vaddr = (!found.probes.is_empty()).then(|| elf.variable_vaddr(STATS_SYMBOL)).flatten();
    // The sampler's fourth argument is the interval; in other emitters it may be anything.
    let own_arguments = usize::from(probes.stats_vaddr.is_some());
    let mut refuse = |reason: String| {
        if probes.refused.len() < REFUSED_SHOWN_MAX {
            probes.refused.push(reason);
        }
    };
    if found.refused > 0 {
        refuse(format!("{} notes of probes are damaged or beyond the limit and were not read", found.refused));
    }
    for provider in PROVIDERS {
        let (mut allocs, mut frees) = (Vec::new(), Vec::new());
        for probe in found.probes.iter().filter(|probe| probe.provider == provider) {
            let (sites, needed, more) = match probe.name.as_str() {
                "alloc" => (&mut allocs, ALLOC_ARGUMENTS, own_arguments),
                "free" => (&mut frees, FREE_ARGUMENTS, 0),
                _ => continue,
            };
            match site(probe, needed, more, emulation) {
                Ok(site) => sites.push(site),
                Err(reason) => refuse(format!("a site of {provider}:{} cannot be used: {reason}", probe.name)),
            }
        }
        match (allocs.is_empty(), frees.is_empty()) {
            (false, false) => probes.sites.push((provider, allocs, frees)),
            (true, true) => {}
            (_, true) => refuse(format!("it has {provider}:alloc but no usable {provider}:free, so live bytes cannot be determined")),
            (true, _) => refuse(format!("it has {provider}:free but no usable {provider}:alloc")),
        }
    }
    // With a refused `alloc` site, its allocations would be missing; with a refused `free` site, its blocks would stay live forever.
    if !probes.refused.is_empty() {
        probes.sites.clear();
    }
    probes
}

/// A site with its first arguments: `needed` of them, and up to `more` additional ones if it has them.
fn site(probe: &Probe, needed: usize, more: usize, emulation: Emulation) -> Result<PassedSite, String> {
    let all = probe.arguments.as_ref().map_err(Clone::clone)?;
    if all.len() < needed {
        return Err(format!("it has {} arguments, the specification requires {needed}", all.len()));
    }
    if emulation.long_nops && probe.code.starts_with(&LONG_NOP) {
        return Err(
            "its nop has five bytes, which this kernel (6.18 and later) replaces by a call into a page that a forked child does not \
             have: children of the program would be killed by SIGSEGV; build the emitter with a sys/sdt.h whose probes are one-byte nops"
                .into(),
        );
    }
    Ok(PassedSite { offset: probe.offset, semaphore: probe.semaphore, arguments: all.iter().take(needed + more).copied().collect() })
}

/// Reads the sampler's statistics from the process: magic and size, T, in_front, samples, weight, frees, overflows, their weight, live_max,
/// limit, lengthened, longest T. A process may have an older version of the library, which has only the first of these.
fn stats_at(memory: &Path, address: u64) -> Option<SamplerStats> {
    let mut bytes = [0u8; STATS_BYTES];
    // Memory after the statistics of an older version may not be mapped.
    let file = File::open(memory).ok()?;
    let read = FileExt::read_at(&file, &mut bytes, address).ok()?;
    let word_of = |bytes: &[u8], at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    // The magic is in the low half, the total size in the high half.
    let first = word_of(&bytes, 0);
    let size = usize::try_from(first >> 32).unwrap_or(0).min(read);
    if first as u32 != STATS_MAGIC || size < STATS_BYTES_MIN {
        return None;
    }
    let word = |at: usize| word_of(bytes.get(..size).unwrap_or_default(), at);
    Some(SamplerStats {
        sample_bytes: word(8),
        in_front: word(16) != 0,
        samples: word(24),
        overflows: word(48),
        samples_per_second: word(72),
        lengthened: word(80),
        longest_sample_bytes: word(88),
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::machine::Machine;
    use crate::process::testing::Cat;
    use crate::sampler::library::{Flavour, install};

    #[test]
    fn the_sampler_in_a_process_is_found_with_its_statistics() {
        let folder = tempfile::tempdir().unwrap();
        install(folder.path()).unwrap();
        let library = folder.path().join(Flavour::Standard.file_name());
        let cat = Cat::start(Path::new("/bin/cat"), library.to_str());
        let found = Finder::new(Emulation::of_release("6.18.0")).find(&Process::open(cat.pid()).unwrap()).unwrap();
        let [emitter] = found.emitters.as_slice() else { panic!("{found:?}") };
        assert_eq!(emitter.describe(), "otel_memory in libfragprof_sampler.so");
        let stats = emitter.stats.unwrap();
        assert_eq!((stats.sample_bytes, stats.in_front), (crate::sampler::SAMPLE_BYTES_DEFAULT, true));
        assert_eq!((stats.samples_per_second, stats.lengthened), (crate::sampler::SAMPLES_PER_SECOND_DEFAULT, 0));
        assert_eq!(emitter.sites.allocs[0].arguments.len(), 4, "it reports the interval");
        assert!(found.refused.is_empty() && emitter.hears());
    }

    #[test]
    fn an_ordinary_process_has_no_emitter() {
        let cat = Cat::start(Path::new("/bin/cat"), None);
        let found = Finder::new(Emulation::default()).find(&Process::open(cat.pid()).unwrap()).unwrap();
        assert_eq!(found, Emitters::default());
    }

    fn probe(name: &str, arguments: &[u8], code: &[u8]) -> Probe {
        Probe {
            provider: "otel_memory".into(),
            name: name.into(),
            offset: crate::units::FileOffset(0x100),
            code: code.to_vec(),
            semaphore: None,
            arguments: usdt::arguments(arguments, Machine::X86_64),
        }
    }

    #[test]
    fn a_five_byte_nop_is_refused_if_the_kernel_replaces_it_by_a_call() {
        let long = probe("free", b"8@%rdi", &[0x0f, 0x1f, 0x44, 0, 0, 0xc3]);
        assert!(site(&long, 1, 0, Emulation::of_release("6.18.2")).unwrap_err().contains("SIGSEGV"));
        assert!(site(&long, 1, 0, Emulation::of_release("6.12.0")).is_ok());
        let short = probe("free", b"8@%rdi", &[0x90, 0x0f, 0x1f, 0x44, 0, 0]);
        assert!(site(&short, 1, 0, Emulation::of_release("6.18.2")).is_ok());
    }

    #[test]
    fn a_probe_with_too_few_or_unreadable_arguments_is_refused_by_name() {
        assert!(site(&probe("alloc", b"8@%rdi 8@%rsi", &[0x90]), 3, 0, Emulation::default()).unwrap_err().contains("2 arguments"));
        assert!(site(&probe("free", b"8@x(%rip)", &[0x90]), 1, 0, Emulation::default()).unwrap_err().contains("x(%rip)"));
        let more = probe("free", b"8@%rdi -4@$3", &[0x90]);
        assert_eq!(site(&more, 1, 0, Emulation::default()).unwrap().arguments.len(), 1, "another emitter's argument is ignored");
        assert_eq!(site(&more, 1, 1, Emulation::default()).unwrap().arguments.len(), 2);
        assert_eq!(site(&more, 1, 2, Emulation::default()).unwrap().arguments.len(), 2, "an older library has none");
    }
}
