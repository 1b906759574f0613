//! Collects from `/proc` what symbolization needs of a running process: the edge of this module.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use rustix::fs::{Mode, OFlags, ResolveFlags};

use super::perf_map::PerfMap;
use super::space::{AddressSpace, Backing, Module, Region};
use crate::process::{self, MappedFile, Maps, Process};

/// Most modules kept for sharing between processes. Only those in use take memory beyond their entry.
const MODULES_MAX: usize = 16 << 10;
/// Most files kept open because no path leads to them after their process has ended (deleted, or in a container). A process has 1024
/// descriptors by default, and probes, ring buffers and symbol files need some too.
pub const KEPT_FILES_MAX: usize = 256;

/// Fills address spaces from live processes. A file that several map is one [`Module`], opened once.
#[derive(Debug, Default)]
pub struct Snapshots {
    modules: HashMap<FileKey, Weak<Module>>,
    kept_files: Vec<Weak<Module>>,
    /// Files beyond [`KEPT_FILES_MAX`] that are reachable only through their process. Their functions have no names after the process has
    /// ended.
    pub refused_files: u64,
}

/// The identity of a file; equal for two mappings of one file as long as it is not written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct FileKey {
    device: u64,
    inode: u64,
    size_bytes: u64,
    modified_ns: i128,
}

impl FileKey {
    fn of(path: &Path) -> Option<Self> {
        let meta = std::fs::metadata(path).ok()?;
        let modified_ns = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
        Some(Self { device: meta.dev(), inode: meta.ino(), size_bytes: meta.len(), modified_ns })
    }
}

impl Snapshots {
    /// Adds the executable part of a process's mappings to its space. Call it again when the mappings have changed, before the process
    /// ends.
    pub fn update(&mut self, space: &mut AddressSpace, process: &Process, maps: &Maps) {
        let executable = maps.mappings.iter().filter(|mapping| mapping.permissions.execute);
        let region = |mapping: &process::Mapping| Region {
            start: mapping.start.0,
            end: mapping.end.0,
            offset: mapping.offset.0,
            backing: self.backing(process, mapping),
        };
        let regions: Vec<Region> = executable.map(region).collect();
        let generates_code = regions.iter().any(|region| matches!(region.backing, Backing::Anonymous));
        if generates_code && space.perf_map_file().is_none() {
            *space.perf_map_file() = perf_map_file(process);
        }
        space.update(regions);
    }

    fn backing(&mut self, process: &Process, mapping: &process::Mapping) -> Backing {
        match &mapping.backing {
            process::Backing::File { path, .. } => Backing::File(self.module(process, mapping, path)),
            process::Backing::Named(name) if name == "[vdso]" => Backing::Vdso,
            // A name that the process gave its anonymous memory does not change what it is: generated code.
            process::Backing::Named(name) if !name.starts_with("[anon:") => Backing::Named(name.clone()),
            process::Backing::Named(_) | process::Backing::Anonymous => Backing::Anonymous,
        }
    }

    fn module(&mut self, process: &Process, mapping: &process::Mapping, path: &Path) -> Arc<Module> {
        let by_address = process.directory().join(format!("map_files/{:x}-{:x}", mapping.start.0, mapping.end.0));
        let key = FileKey::of(&by_address);
        if let Some(known) = key.and_then(|key| self.modules.get(&key)).and_then(Weak::upgrade) {
            return known;
        }
        let shown = path.to_string_lossy().into_owned();
        let Ok(mapped) = MappedFile::open(process, mapping) else {
            // Not an ELF file, or deleted: its frames are named by the path only.
            return Arc::new(Module { path: shown, open_path: PathBuf::new(), file: None, build_id: Vec::new() });
        };
        let id = &mapped.identity;
        let key = FileKey { device: id.device, inode: id.inode, size_bytes: id.size_bytes, modified_ns: id.modified_ns };
        let build_id = id.build_id.as_ref().map(|id| id.0.clone()).unwrap_or_default();
        // A path that leads to the same file from here outlives the process; otherwise the file is kept open.
        let (open_path, file) =
            if FileKey::of(path) == Some(key) { (path.to_path_buf(), None) } else { self.opened_to_keep(mapped.attach_path) };
        let module = Arc::new(Module { path: shown, open_path, file, build_id });
        if module.file.is_some() {
            self.kept_files.push(Arc::downgrade(&module));
        }
        if self.modules.len() >= MODULES_MAX {
            self.modules.retain(|_, module| module.strong_count() > 0);
        }
        if self.modules.len() < MODULES_MAX {
            self.modules.insert(key, Arc::downgrade(&module));
        }
        module
    }

    fn opened_to_keep(&mut self, path: PathBuf) -> (PathBuf, Option<File>) {
        self.kept_files.retain(|module| module.strong_count() > 0);
        if self.kept_files.len() >= KEPT_FILES_MAX {
            self.refused_files += 1;
            return (path, None);
        }
        let file = File::open(&path).ok();
        (path, file)
    }
}

/// Reads the perf map that a just-in-time compiler of the process wrote, if there is one, into its space; of a process that has ended, the
/// one that was there at the last [update](Snapshots::update), whose file is closed then.
pub fn read_perf_map(space: &mut AddressSpace, process: &Process) {
    let present = perf_map_file(process);
    let is_present = present.is_some();
    let file = present.or_else(|| space.perf_map_file().take());
    if let Some(map) = file.as_ref().and_then(|file| PerfMap::read(file).ok()) {
        space.set_perf_map(map);
    }
    if is_present {
        *space.perf_map_file() = file;
    }
}

/// Whether a just-in-time compiler of the process has written a perf map.
#[must_use]
pub fn has_perf_map(process: &Process) -> bool {
    perf_map_file(process).is_some()
}

/// The path is resolved within the process's root: its links are under the process's control.
fn perf_map_file(process: &Process) -> Option<File> {
    let root = File::open(process.directory().join("root")).ok()?;
    let path = format!("tmp/perf-{}.map", process.inner_pid());
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve).ok().map(File::from)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::bpf::FRAME_EXACT;
    use crate::symbol::Symbolizer;
    use crate::units::Pid;

    const PROGRAM: &str = r#"
#include <stdio.h>
#include <unistd.h>
__attribute__((noinline)) int shop_create(int id) { return id + getpid(); }
int main(void) {
    printf("%p %d\n", (void *)shop_create, shop_create(1) == 0);
    fflush(stdout);
    pause();
}
"#;

    /// A process that is ended with the test, also with one that fails.
    struct Running(Child);

    impl Running {
        fn id(&self) -> u32 {
            self.0.id()
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            drop(self.0.kill());
            drop(self.0.wait());
        }
    }

    fn built(dir: &Path) -> PathBuf {
        let (source, program) = (dir.join("shop.c"), dir.join("shop"));
        std::fs::write(&source, PROGRAM).unwrap();
        assert!(Command::new("cc").args(["-O1", "-g", "-o"]).arg(&program).arg(&source).status().unwrap().success());
        program
    }

    /// Starts the program and waits until it runs; with the address of its function.
    fn started(program: &Path) -> (Running, u64) {
        let mut child = Command::new(program).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = u64::from_str_radix(line.split(' ').next().unwrap().trim_start_matches("0x"), 16).unwrap();
        (Running(child), address)
    }

    fn taken(snapshots: &mut Snapshots, child: &Running) -> AddressSpace {
        let process = Process::open(Pid(child.id())).unwrap();
        let mut space = AddressSpace::new(child.id(), Vec::new());
        snapshots.update(&mut space, &process, &process.maps().unwrap());
        read_perf_map(&mut space, &process);
        space
    }

    #[test]
    fn a_function_of_an_ended_process_is_still_named() {
        let dir = tempfile::tempdir().unwrap();
        let (child, address) = started(&built(dir.path()));
        let space = taken(&mut Snapshots::default(), &child);
        drop(child);
        let frames = Symbolizer::new().stack(&space, &[address | FRAME_EXACT]);
        assert_eq!((&*frames[0].function, frames[0].line), ("shop_create", 4));
        assert_eq!(&*frames[0].module, dir.path().join("shop").to_str().unwrap());
    }

    #[test]
    fn a_function_of_an_ended_process_with_a_deleted_program_is_still_named() {
        let dir = tempfile::tempdir().unwrap();
        let (child, address) = started(&built(dir.path()));
        std::fs::remove_file(dir.path().join("shop")).unwrap();
        let space = taken(&mut Snapshots::default(), &child);
        drop(child);
        let frames = Symbolizer::new().stack(&space, &[address | FRAME_EXACT]);
        assert_eq!((&*frames[0].function, frames[0].line), ("shop_create", 4));
        assert!(!frames[0].build_id.is_empty());
    }

    #[test]
    fn two_processes_share_the_modules_they_map() {
        let dir = tempfile::tempdir().unwrap();
        let program = built(dir.path());
        let ((first, address), (second, _)) = (started(&program), started(&program));
        let mut snapshots = Snapshots::default();
        let spaces = [&first, &second].map(|child| taken(&mut snapshots, child));
        let one = spaces[0].find(address).unwrap().clone();
        let Backing::File(module) = &one.backing else { panic!("{one:?}") };
        assert!(Arc::strong_count(module) >= 3, "both spaces and this clone");
    }

    #[test]
    fn the_vdso_is_found_and_a_perf_map_names_generated_code() {
        let dir = tempfile::tempdir().unwrap();
        let (child, _) = started(&built(dir.path()));
        let path = format!("/tmp/perf-{}.map", child.id());
        std::fs::write(&path, "1000 10 jitted\n").unwrap();
        let process = Process::open(Pid(child.id())).unwrap();
        let space = taken(&mut Snapshots::default(), &child);
        std::fs::remove_file(&path).unwrap();
        let vdso = process.maps().unwrap().mappings.into_iter().find(|m| m.backing == process::Backing::Named("[vdso]".into())).unwrap();
        drop(child);
        assert!(matches!(space.find(vdso.start.0).unwrap().backing, Backing::Vdso));
        assert_eq!(space.perf_map().unwrap().find(0x1004).as_deref(), Some("jitted"));
    }
}
