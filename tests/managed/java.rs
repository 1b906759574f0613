//! JDKs on this machine, and Java programs compiled for them.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::build;
use crate::support::process::run;
use crate::support::skip;

/// Where this folder's sources are.
pub fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/managed/java").join(name)
}

/// A JVM.
#[derive(Debug, Clone)]
pub struct Java {
    /// The program.
    pub program: PathBuf,
    /// Major version.
    pub version: u32,
}

/// Every JVM that is found, one of each version: the one on the path first, those where distributions put them, and those in
/// `FRAGPROF_TEST_JAVA`, a list of folders like `JAVA_HOME`. Empty, and said, if there is none.
pub fn all() -> Vec<Java> {
    let mut homes: Vec<PathBuf> = std::env::var_os("FRAGPROF_TEST_JAVA").iter().flat_map(std::env::split_paths).collect();
    let mut installed: Vec<PathBuf> = std::fs::read_dir("/usr/lib/jvm").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    installed.sort();
    homes.extend(installed);
    let on_path = build::tool("java").into_iter();
    let mut found: Vec<Java> = Vec::new();
    for program in on_path.chain(homes.into_iter().map(|home| home.join("bin/java"))).filter(|program| program.is_file()) {
        if let Some(version) = version(&program)
            && found.iter().all(|java| java.version != version)
        {
            found.push(Java { program, version });
        }
    }
    if found.is_empty() {
        skip::<()>("no JVM was found");
    }
    found.sort_by_key(|java| java.version);
    found
}

/// The major version that a JVM says it has.
fn version(program: &Path) -> Option<u32> {
    let said = run(Command::new(program).args(["-XshowSettings:properties", "-version"]));
    let line = said.err.lines().find_map(|line| line.trim().strip_prefix("java.specification.version = ").map(str::to_owned))?;
    line.strip_prefix("1.").unwrap_or(&line).parse().ok()
}

impl Java {
    /// A command with these options.
    pub fn command<S: AsRef<OsStr>>(&self, options: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(options).env_remove("JAVA_TOOL_OPTIONS");
        command
    }

    /// What its programs are compiled for: JDK 8, or 11 and later.
    pub fn release(&self) -> &'static str {
        if self.version < 11 { "8" } else { "11" }
    }

    /// Whether it has a collector.
    pub fn has(&self, option: &str) -> bool {
        run(&mut self.command([option, "-version"])).status.success()
    }
}

/// Compiles sources of this folder, or other ones, for a JVM.
pub fn compile(java: &Java, directory: &Path, sources: &[PathBuf]) {
    let mut javac = Command::new("javac");
    let done = run(javac.args(["-nowarn", "-Xlint:-options", "-g", "--release", java.release(), "-d"]).arg(directory).args(sources));
    assert!(done.status.success(), "javac failed (install default-jdk-headless):\n{}\n{}", done.out, done.err);
}

/// A JAR with the programs Probe and Shapes.
pub fn shapes(java: &Java) -> PathBuf {
    let sources = [source("Probe.java"), source("Shapes.java")];
    build::keep(&format!("shapes-{}.jar", java.release()), java.release(), &[&sources[0], &sources[1]], |out| {
        let classes = tempfile::tempdir().unwrap();
        compile(java, classes.path(), &sources);
        let done = run(Command::new("jar").arg("cf").arg(out).arg("-C").arg(classes.path()).arg("."));
        assert!(done.status.success(), "jar failed:\n{}", done.err);
    })
}

/// Compiles a JVMTI agent or JNI library; returns its path.
pub fn library(name: &str) -> PathBuf {
    let source = source(name);
    let flags = ["-O2", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fno-builtin", "-pthread"];
    build::keep(&format!("java-{}.so", name.trim_end_matches(".c")), flags, &[&source], |out| {
        let javac = std::fs::canonicalize(build::tool("javac").expect("javac is installed")).unwrap();
        let include = javac.parent().and_then(Path::parent).unwrap().join("include");
        let mut cc = Command::new("cc");
        cc.args(flags).arg("-I").arg(&include).arg("-I").arg(include.join("linux")).arg(&source).arg("-o").arg(out);
        let done = run(&mut cc);
        assert!(done.status.success(), "{}", done.err);
    })
}
