//! The symbolizer's view of a live process: its executable mappings, with the files opened while they can be.

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use crate::symbol::{AddressSpace, Backing as SymbolBacking, Module, PerfMap, Region};
use crate::target::{Backing, MappedFile, Mapping, Maps, Process};

/// Files kept open for symbols, over one process. Beyond it a file is found again by its path, if it is still there.
const OPEN_FILES_MAX: usize = 512;

/// The modules of a process by device and inode, so that each file is opened once.
#[derive(Debug, Default)]
pub struct Modules {
    by_file: HashMap<(u32, u32, u64), Arc<Module>>,
}

impl Modules {
    /// The executable regions of the process at this moment.
    pub fn regions(&mut self, process: &Process, maps: &Maps) -> Vec<Region> {
        maps.mappings.iter().filter(|m| m.permissions.execute).map(|mapping| self.region(process, mapping)).collect()
    }

    fn region(&mut self, process: &Process, mapping: &Mapping) -> Region {
        let backing = match &mapping.backing {
            Backing::File { .. } => SymbolBacking::File(self.module(process, mapping)),
            Backing::Named(name) if name == "[vdso]" => SymbolBacking::Vdso,
            // The name of anonymous memory does not change what it is: generated code.
            Backing::Named(name) if !name.starts_with("[anon:") => SymbolBacking::Named(name.clone()),
            Backing::Named(_) | Backing::Anonymous => SymbolBacking::Anonymous,
        };
        Region { start: mapping.start.0, end: mapping.end.0, offset: mapping.offset.0, backing }
    }

    fn module(&mut self, process: &Process, mapping: &Mapping) -> Arc<Module> {
        let key = (mapping.device.major, mapping.device.minor, mapping.inode);
        if let Some(module) = self.by_file.get(&key) {
            return Arc::clone(module);
        }
        let path = mapping.path().map(|p| p.to_string_lossy().into_owned()).unwrap_or_default();
        let opened = MappedFile::open(process, mapping).ok();
        let open_path = opened.as_ref().map_or_else(|| PathBuf::from(&path), |file| file.attach_path.clone());
        let build_id = opened.and_then(|file| file.identity.build_id).map(|id| id.0).unwrap_or_default();
        let file = (self.by_file.len() < OPEN_FILES_MAX).then(|| File::open(&open_path).ok()).flatten();
        let module = Arc::new(Module { path, open_path, file, build_id });
        self.by_file.insert(key, Arc::clone(&module));
        module
    }
}

/// Reads the process's perf map, if its runtime writes one, into the space.
pub fn read_perf_map(process: &Process, space: &mut AddressSpace) {
    let path = process.directory().join(format!("root/tmp/perf-{}.map", process.inner_pid()));
    if let Ok(map) = PerfMap::read(&path) {
        space.set_perf_map(map);
    }
}
