//! From a library and its loader to its sites: run, choose, judge.

use std::path::{Path, PathBuf};

use crate::process::elf::Elf;
use crate::process::functions::Functions;
use crate::selective::choose::choose;
use crate::selective::judge::judge;
use crate::selective::observed::{Done, Function};
use crate::selective::sandbox::{Refused, Sandbox};
use crate::selective::scope::{Scope, scope};
use crate::selective::scratch::{Scratch, Symbols, Taken, Watch};
use crate::selective::tracer::{Failed, Interest};
use crate::selective::{LargeSites, Library, NoSites, Unfit, read_file, script};

/// The program, built by build.rs from scratch.c.
const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/scratch"));

/// Maximum number of scripts by which sites are chosen: each one after the first judges the previous choice, and is added to the requests
/// if it contradicts it.
const ROUNDS_MAX: u64 = 4;
/// Number of requests that judge by breakpoints.
const COUNTED_REQUESTS: usize = 3000;

/// Finds the sites of a library by running it.
///
/// # Errors
/// As [`crate::selective::find`].
pub(super) fn find(library: &Library, loader: &Path, store: Option<&Path>) -> Result<LargeSites, NoSites> {
    let build_id = || library.build_id.clone();
    let loader_bytes = read_file(loader)?;
    let loader_elf = Elf::parse(loader_bytes.clone()).map_err(|source| NoSites::Elf { path: loader.to_owned(), source })?;
    let symbols = symbols(library, &loader_elf, loader)?;
    let functions = Functions::of(&library.elf);
    let scopes = [symbols.malloc, symbols.calloc, symbols.free].map(|entry| scope(&library.elf, &functions, entry));
    // In a container with a read-only root the store may be the only writable directory.
    let folders: Vec<PathBuf> = [std::env::temp_dir()].into_iter().chain(store.map(Path::to_owned)).collect();
    let refused = |refused: Refused| NoSites::Sandbox { build_id: build_id(), step: refused.step, source: refused.source };
    let sandbox = Sandbox::start(&folders, &loader_bytes, &library.bytes, PROGRAM).map_err(refused)?;
    let found = Scratch::start(sandbox, &library.elf, &loader_elf, symbols).and_then(|mut scratch| search(&mut scratch, library, &scopes));
    match found {
        Ok(Ok(sites)) => Ok(sites),
        Ok(Err(why)) => Err(NoSites::Unfit { build_id: build_id(), why }),
        Err(Failed(what)) => Err(NoSites::Run { build_id: build_id(), what }),
    }
}

/// Addresses of the functions to call; the error says what is missing.
fn symbols(library: &Library, loader: &Elf<Vec<u8>>, loader_path: &Path) -> Result<Symbols, NoSites> {
    let function = |elf: &Elf<Vec<u8>>, path: &Path, what: &'static str| {
        let mut found = None;
        elf.for_each_function(|function| {
            if function.exported && function.name == what.as_bytes() {
                found.get_or_insert(function.vaddr);
            }
        });
        found.ok_or_else(|| NoSites::NotGlibc { path: path.to_owned(), what })
    };
    Ok(Symbols {
        malloc: function(&library.elf, &library.path, "malloc")?,
        calloc: function(&library.elf, &library.path, "calloc")?,
        free: function(&library.elf, &library.path, "free")?,
        mallopt: function(&library.elf, &library.path, "mallopt")?,
        single_threaded: library.elf.variable_vaddr(b"__libc_single_threaded"),
        allocate_tls: function(loader, loader_path, "_dl_allocate_tls")?,
    })
}

/// Searches near the functions, and if nothing is found, also in functions that they call. For free, a called function often puts blocks
/// into the cache, so its callees are included at once.
fn search(scratch: &mut Scratch, library: &Library, scopes: &[Scope; 3]) -> Result<Result<LargeSites, Unfit>, Failed> {
    let shallow: [Scope; 3] = std::array::from_fn(|nth| {
        let mut scope = scopes[nth].clone();
        scope.candidates.retain(|candidate| candidate.depth == 0 || Function::ALL[nth] == Function::Free);
        scope
    });
    match search_in(scratch, library, &shallow, true)? {
        Err(Unfit::NoCover(_)) => search_in(scratch, library, scopes, false),
        found => Ok(found),
    }
}

/// Runs scripts until the sites chosen by some are right for others.
fn search_in(
    scratch: &mut Scratch,
    library: &Library,
    scopes: &[Scope; 3],
    new_threads: bool,
) -> Result<Result<LargeSites, Unfit>, Failed> {
    let candidates = scopes.iter().flat_map(|scope| &scope.candidates).map(|candidate| (candidate.vaddr, Interest::Candidate));
    let locks = scopes.iter().flat_map(|scope| &scope.locks).map(|&vaddr| (vaddr, Interest::Lock));
    let mut requests: Vec<Done> = Vec::new();
    let mut chosen: Option<LargeSites> = None;
    for round in 0..ROUNDS_MAX {
        let script = script::every_way(round, new_threads && round == 0);
        let more = scratch.run(&script, Watch::Closely, candidates.clone().chain(locks.clone()))?;
        if let Err(unfit) = all_ways(&scratch.taken) {
            return Ok(Err(unfit));
        }
        if let Some(sites) = &chosen
            && judge(sites, &more).is_ok()
        {
            let at = sites.allocs.iter().chain(&sites.frees).map(|site| (site.vaddr, Interest::Candidate));
            let counted = scratch.run(&script::at_random(round, COUNTED_REQUESTS), Watch::Counting, at)?;
            return Ok(judge(sites, &counted).map(|()| sites.clone()));
        }
        requests.extend(more);
        chosen = match choose_all(library, scopes, &requests) {
            Ok(sites) => Some(sites),
            Err(unfit) => return Ok(Err(unfit)),
        };
    }
    Ok(Err(Unfit::Refuted("malloc, calloc or free")))
}

/// Whether every path that needs sites was taken.
fn all_ways(taken: &Taken) -> Result<(), Unfit> {
    let ways = [
        (taken.cached == [true; 3], "serve small blocks from a thread cache"),
        (taken.locks, "lock its arenas among several threads"),
        (taken.other_arena, "use a second arena"),
        (taken.waits == [true; 2], "wait for a lock"),
        (taken.failure, "fail"),
    ];
    ways.into_iter().find(|(taken, _)| !taken).map_or(Ok(()), |(_, way)| Err(Unfit::NotTried(way)))
}

fn choose_all(library: &Library, scopes: &[Scope; 3], requests: &[Done]) -> Result<LargeSites, Unfit> {
    let mut sites = LargeSites { allocs: Vec::new(), frees: Vec::new() };
    for (function, scope) in Function::ALL.into_iter().zip(scopes) {
        for mut site in choose(function, &scope.candidates, requests)? {
            site.offset = library.elf.offset_of(site.vaddr).map_or(0, |offset| offset.0);
            if function == Function::Free { &mut sites.frees } else { &mut sites.allocs }.push(site);
        }
    }
    Ok(sites)
}
