//! The ledger that is preloaded into the programs (ledger.c): its files, and the requests to a process.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::support::process::{run, wait_until};

const MAGIC: u64 = 0x6c65_6467_6572_3031;
const REQUEST_AT: u64 = 13 * 8;
const ANSWER_WORD: usize = 14;
const WORDS: usize = 28;
const EXE_BYTES: usize = 256;

/// A request to a process, `enum request` of ledger.c.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Continue.
    None = 0,
    /// Stop at the entry of the next call and write the statistics.
    Hold = 1,
    /// Let the allocator return free memory to the kernel; only while stopped.
    Trim = 2,
}

/// `answer` of a process that is stopped before its main.
const KEPT: u64 = 3;

/// The allocator whose statistics the ledger has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Allocator {
    /// None: no statistics were requested.
    Unknown,
    /// `mallinfo2`.
    Glibc,
    /// `mallctl`.
    Jemalloc,
    /// `MallocExtension`.
    Tcmalloc,
}

/// The file of one process, or of one of its images if it called exec: `struct shared` of ledger.c.
#[derive(Debug, Clone)]
pub struct Entry {
    /// Path of the file.
    pub path: PathBuf,
    /// Process id.
    pub pid: u32,
    /// When it made its first call, `CLOCK_MONOTONIC`.
    pub began_ns: u64,
    /// The program's file.
    pub exe: String,
    words: [u64; WORDS],
}

impl Entry {
    fn read(path: &Path) -> Option<Self> {
        let data = fs::read(path).ok()?;
        if data.len() < WORDS * 8 + EXE_BYTES {
            return None;
        }
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(data.chunks_exact(8)) {
            *word = u64::from_ne_bytes(bytes.try_into().unwrap());
        }
        let (pid, began) = path.file_name()?.to_str()?.split_once('.')?;
        let exe = data[WORDS * 8..].split(|byte| *byte == 0).next()?;
        let exe = String::from_utf8_lossy(exe).into_owned();
        (words[0] == MAGIC).then_some(Self { path: path.into(), pid: pid.parse().ok()?, began_ns: began.parse().ok()?, exe, words })
    }

    /// Calls that returned a block.
    pub fn allocations(&self) -> u64 {
        self.words[2]
    }

    /// Bytes that they requested.
    pub fn bytes(&self) -> u64 {
        self.words[3]
    }

    /// Live blocks of this process.
    pub fn live_blocks(&self) -> u64 {
        self.words[4]
    }

    /// Their bytes.
    pub fn live_bytes(&self) -> u64 {
        self.words[5]
    }

    /// Peak of the live bytes.
    pub fn peak_bytes(&self) -> u64 {
        self.words[6]
    }

    /// Blocks for which the ledger had no room, which makes it invalid.
    pub fn missed(&self) -> u64 {
        self.words[9]
    }

    /// Maximum error of the peak: the order of simultaneous calls is not known, so one block for each thread but one may be missing from
    /// it, or be in it too early.
    pub fn peak_doubt_bytes(&self) -> u64 {
        self.words[11].saturating_sub(1) * self.words[12]
    }

    /// The allocator of the statistics.
    pub fn allocator(&self) -> Allocator {
        match self.words[15] {
            1 => Allocator::Glibc,
            2 => Allocator::Jemalloc,
            3 => Allocator::Tcmalloc,
            _ => Allocator::Unknown,
        }
    }

    /// Word of the statistics, see `account()` of ledger.c.
    pub fn account(&self, word: usize) -> u64 {
        self.words[16 + word]
    }

    /// Last part of the program's path.
    pub fn program(&self) -> &str {
        self.exe.rsplit('/').next().unwrap_or_default()
    }

    /// The same file, read again.
    pub fn again(&self) -> Self {
        Self::read(&self.path).expect("a ledger's file remains")
    }

    /// Sends the process a request, without waiting.
    pub fn ask(&self, request: Request) {
        let file = File::options().write(true).open(&self.path).expect("a ledger's file can be written");
        file.write_all_at(&(request as u64).to_ne_bytes(), REQUEST_AT).expect("a ledger's file can be written");
    }

    /// Whether it has answered.
    pub fn answered(&self, request: Request) -> bool {
        self.again().words[ANSWER_WORD] == request as u64
    }

    /// Whether the process exists.
    pub fn is_alive(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid)).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }
}

/// A directory of ledgers, for one run of a program.
pub struct Ledgers {
    dir: TempDir,
}

impl Ledgers {
    pub fn new() -> Self {
        let dir = TempDir::new().expect("a temporary directory can be created");
        // Also for programs that drop root privileges.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o1777)).expect("its mode can be set");
        Self { dir }
    }

    /// Sets the environment of a command that is started with the ledger, preloaded after `before` and before `behind`.
    pub fn prepare(&self, command: &mut Command, before: Option<&Path>, behind: &str, is_kept: bool) {
        let mut preload = before.map_or_else(String::new, |path| format!("{}:", path.display()));
        preload += &library().display().to_string();
        if !behind.is_empty() {
            preload += &format!(":{behind}");
        }
        command.env("LD_PRELOAD", preload).env("LEDGER_DIR", self.dir.path());
        if is_kept {
            command.env("LEDGER_HOLD", "1");
        }
    }

    /// All files, oldest first.
    pub fn all(&self) -> Vec<Entry> {
        let files = fs::read_dir(self.dir.path()).into_iter().flatten().flatten();
        let mut all: Vec<Entry> = files.filter_map(|file| Entry::read(&file.path())).collect();
        all.sort_by_key(|entry| entry.began_ns);
        all
    }

    /// The last image of a process.
    pub fn of(&self, pid: u32) -> Option<Entry> {
        self.all().into_iter().rfind(|entry| entry.pid == pid)
    }

    /// Waits until a process is stopped before its main.
    pub fn wait_until_kept(&self, pid: u32) {
        wait_until("the program is stopped before its main", || self.of(pid).is_some_and(|entry| entry.words[ANSWER_WORD] == KEPT));
    }

    /// Resumes the stopped processes.
    pub fn let_go(&self) {
        File::create(self.dir.path().join("go")).expect("a file can be created");
    }
}

/// The library, built once for each state of its source.
pub fn library() -> PathBuf {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/truth/ledger.c");
    let mut hasher = DefaultHasher::new();
    fs::read(&source).expect("the source exists").hash(&mut hasher);
    let dir = std::env::temp_dir().join("fragprof-truth-ledger");
    fs::create_dir_all(&dir).expect("a directory can be created");
    let path = dir.join(format!("ledger-{:016x}.so", hasher.finish()));
    if !path.exists() {
        let fresh = dir.join(format!("fresh-{}-{:?}", std::process::id(), std::thread::current().id()));
        let done = run(Command::new("cc")
            .args(["-O2", "-g", "-Wall", "-Werror", "-fno-builtin", "-fexceptions", "-shared", "-fPIC", "-o"])
            .arg(&fresh)
            .arg(&source));
        assert!(done.status.success(), "{}", done.err);
        fs::rename(&fresh, &path).expect("it can be renamed");
    }
    path
}
