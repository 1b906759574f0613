//! CPythons on this machine.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::build;
use crate::support::process::run;

/// Where this folder's sources are.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/managed/python").join(name)
}

/// A CPython.
#[derive(Debug, Clone)]
pub struct Python {
    /// The program.
    pub program: PathBuf,
    /// Its version, as it says it: 3.11.7.
    pub version: String,
    /// Of 3.x.
    pub minor: u32,
}

/// Every CPython whose frames are named: the distribution's, those of pyenv, and those in `FRAGPROF_TEST_PYTHON`, a list of programs.
pub fn all() -> Vec<Python> {
    let mut programs: Vec<PathBuf> = std::env::var_os("FRAGPROF_TEST_PYTHON").iter().flat_map(std::env::split_paths).collect();
    programs.push("/usr/bin/python3".into());
    let pyenv = std::env::var_os("PYENV_ROOT").map(PathBuf::from).or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".pyenv")));
    let installed = pyenv.and_then(|root| std::fs::read_dir(root.join("versions")).ok());
    let mut installed: Vec<PathBuf> = installed.into_iter().flatten().flatten().map(|entry| entry.path().join("bin/python3")).collect();
    installed.sort();
    programs.extend(installed);
    let mut found: Vec<Python> = programs.into_iter().filter(|program| program.is_file()).filter_map(python).collect();
    found.sort_by_key(|python| python.minor);
    assert!(!found.is_empty(), "no CPython was found: install python3");
    found
}

/// One whose frames are named.
pub fn one() -> Python {
    all().into_iter().next_back().unwrap()
}

fn python(program: PathBuf) -> Option<Python> {
    let said = run(Command::new(&program).args(["-c", "import sys; print(*sys.version_info[:3], sep='.')"]));
    let version = said.out.trim().to_owned();
    let minor = version.strip_prefix("3.")?.split('.').next()?.parse().ok()?;
    (8..=14).contains(&minor).then_some(Python { program, version, minor })
}

/// Compiles the library that allocates and calls back.
pub fn library() -> PathBuf {
    let source = source("block.c");
    let mut args: Vec<String> =
        ["-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fno-builtin", "-pthread"].map(String::from).into();
    args.push(source.display().to_string());
    build::compile("cc", &args, &source, "python-block.so", &[])
}
