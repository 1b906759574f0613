//! Real programs that do one unit of work on command, repeatedly.

use std::cell::Cell;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{ChildStdin, Command};

use tempfile::TempDir;

use super::databases;
use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};

/// How a running program is made to work.
pub trait Load: Send {
    /// Waits until it can work.
    fn begin(&mut self, process: &Process);
    /// One unit, from idle to idle.
    fn work(&mut self, process: &Process, input: &mut ChildStdin);
}

/// A program with its work.
pub struct Workload {
    /// Its name in the output.
    pub name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    env: Vec<(&'static str, &'static str)>,
    work: Work,
}

enum Work {
    /// It reads commands from its standard input, and answers each unit with a line `DONE`.
    Lines(String),
    /// It is a server on a socket in a folder; another program makes it work.
    Redis { folder: TempDir, started: Cell<usize>, pipelined: &'static str },
    /// A backend of PostgreSQL without its server; each that is started has a database of its own.
    Postgres { folder: TempDir, started: Cell<usize> },
    /// A server with threads; another program makes it work.
    Mariadb { folder: TempDir, started: Cell<usize> },
}

impl Workload {
    /// Starts it, after a prefix of other words. For a server, the load is that of the one started last.
    pub fn command(&self, prefix: &[String]) -> Command {
        let mut words = prefix.iter().map(PathBuf::from).chain([self.program.clone()]);
        let mut command = Command::new(words.next().unwrap());
        command.args(words).args(&self.arguments).envs(self.env.iter().copied());
        match &self.work {
            Work::Lines(_) => {}
            Work::Redis { folder, started, .. } => {
                started.set(started.get() + 1);
                command.arg("--unixsocket").arg(socket(folder, started.get())).arg("--dir").arg(folder.path());
            }
            Work::Postgres { folder, started } => {
                started.set(started.get() + 1);
                command.arg("-D").arg(databases::postgres(folder.path(), started.get())).arg("postgres");
            }
            Work::Mariadb { folder, started } => {
                started.set(started.get() + 1);
                command.args(databases::mariadb(folder.path(), started.get()));
                command.arg("--socket").arg(socket(folder, started.get()));
            }
        }
        command
    }

    /// Whether it is run under heaptrack too. A backend of PostgreSQL was seen to end there before its first answer.
    pub fn is_compared_with_heaptrack(&self) -> bool {
        !matches!(self.work, Work::Postgres { .. })
    }

    /// Its load.
    pub fn load(&self) -> Box<dyn Load> {
        match &self.work {
            Work::Lines(unit) => Box::new(Lines { unit: unit.clone(), done: 0 }),
            Work::Redis { folder, started, pipelined } => Box::new(Redis { socket: socket(folder, started.get()), pipelined }),
            Work::Postgres { .. } => Box::new(Lines { unit: crate::support::postgres::WORK.to_owned(), done: 0 }),
            Work::Mariadb { folder, started } => Box::new(databases::Mariadb::new(socket(folder, started.get()))),
        }
    }
}

fn socket(folder: &TempDir, number: usize) -> PathBuf {
    folder.path().join(format!("{number}.sock"))
}

struct Lines {
    unit: String,
    done: usize,
}

/// Waits until the main thread waits: what a program does until then belongs to its unit.
pub fn wait_for_idle(process: &Process) {
    let stat = format!("/proc/{}/stat", process.pid());
    wait_until("it is idle", || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S ")));
}

impl Load for Lines {
    fn begin(&mut self, _: &Process) {}

    fn work(&mut self, process: &Process, input: &mut ChildStdin) {
        input.write_all(self.unit.as_bytes()).unwrap();
        // A database's answer is formatted.
        loop {
            let line = process.out.nth(self.done, LIMIT);
            self.done += 1;
            if line.unwrap_or_else(|| panic!("{}", process.err)).contains("DONE") {
                break;
            }
        }
        wait_for_idle(process);
    }
}

struct Redis {
    socket: PathBuf,
    /// Requests that a client sends at a time.
    pipelined: &'static str,
}

impl Load for Redis {
    fn begin(&mut self, _: &Process) {
        wait_until("redis listens", || self.socket.exists());
    }

    fn work(&mut self, process: &Process, _: &mut ChildStdin) {
        let done = run(Command::new("redis-benchmark").arg("-s").arg(&self.socket).args([
            "-q",
            "-n",
            "15000",
            "-r",
            "20000",
            "-d",
            "300",
            "-c",
            "20",
            "-P",
            self.pipelined,
            "-t",
            "set,lpush,lpop,sadd,hset",
        ]));
        assert!(done.status.success(), "{}", done.err);
        wait_for_idle(process);
    }
}

const PYTHON: &str = "
import json, sys
for line in sys.stdin:
    for i in range(2):
        x = [{'k%d' % j: [j] * 5, 'v': str(j) * 3} for j in range(6000)]
        json.loads(json.dumps(x))
    print('DONE', flush=True)
";
const PERL: &str =
    "$| = 1; while (<STDIN>) { for my $r (1..2) { my %h; for my $i (1..40000) { $h{$i} = 'v' x ($i % 90) } } print \"DONE\\n\" }";
const NODE: &str = "
require('readline').createInterface({ input: process.stdin }).on('line', () => {
  const keep = [];
  for (let r = 0; r < 8; r++) {
    for (let i = 0; i < 3000; i++) keep[i] = Buffer.alloc(9000 + i);
    JSON.parse(JSON.stringify(keep.slice(0, 20).map((b) => b.toString('hex'))));
  }
  console.log('DONE');
});
";
const SQL: &str = "drop table if exists t; create table t(a integer primary key, b text); \
with recursive n(i) as (select 1 union all select i+1 from n where i<120000) insert into t select i, hex(zeroblob(i%60)) from n; \
create index x on t(b); select 'DONE' from (select count(*), sum(length(b)) from t where b > '0');\n";
const JAVA: &str = "
import java.nio.ByteBuffer;
import java.util.zip.*;
class Work {
  public static void main(String[] a) throws Exception {
    byte[] text = new byte[200000];
    for (int i = 0; i < text.length; i++) text[i] = (byte) (i % 61);
    byte[] out = new byte[400000];
    while (System.in.read() >= 0) {
      for (int r = 0; r < 300; r++) {
        Deflater d = new Deflater(1); d.setInput(text); d.finish(); d.deflate(out); d.end();
        for (int i = 0; i < 300; i++) {
          ByteBuffer b = ByteBuffer.allocateDirect(4000 + i); b.putInt(0, i);
          ((sun.nio.ch.DirectBuffer) b).cleaner().clean();
        }
      }
      System.out.println(\"DONE\");
    }
  }
}
";

/// Those that are installed.
pub fn workloads() -> Vec<Workload> {
    let mut all = Vec::new();
    let mut add = |name, program: &str, arguments: Vec<String>, env, work| match tool(program) {
        Some(program) => all.push(Workload { name, program: real(program), arguments, env, work }),
        None => println!("{name}: not installed"),
    };
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let line = || Work::Lines("\n".to_owned());
    for (name, pipelined) in [("redis", "1"), ("redis, pipelined", "16")] {
        let server = Work::Redis { folder: TempDir::new().unwrap(), started: Cell::new(0), pipelined };
        add(name, "redis-server", words(&["--port", "0", "--save", "", "--appendonly", "no"]), vec![], server);
    }
    add("python3", "python3", words(&["-u", "-c", PYTHON]), vec![], line());
    add("python3 on malloc", "python3", words(&["-u", "-c", PYTHON]), vec![("PYTHONMALLOC", "malloc")], line());
    add("node", "node", words(&["-e", NODE]), vec![], line());
    add("sqlite3", "sqlite3", words(&["-batch", ":memory:"]), vec![], Work::Lines(SQL.to_owned()));
    add("perl", "perl", words(&["-e", PERL]), vec![], line());
    let source = std::env::temp_dir().join(format!("fragprof-{}", std::process::id())).join("Work.java");
    std::fs::create_dir_all(source.parent().unwrap()).unwrap();
    std::fs::write(&source, JAVA).unwrap();
    let flags = [
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
        "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    ];
    add("java, direct buffers", "java", [words(&flags), vec![source.display().to_string()]].concat(), vec![], line());
    if let Some((program, arguments)) = databases::postgres_backend() {
        let work = Work::Postgres { folder: TempDir::new().unwrap(), started: Cell::new(0) };
        all.push(Workload { name: "postgres, a backend", program, arguments, env: vec![], work });
    } else {
        println!("postgres: not installed");
    }
    if let Some(program) = databases::mariadb_server() {
        let work = Work::Mariadb { folder: TempDir::new().unwrap(), started: Cell::new(0) };
        all.push(Workload { name: "mariadb", program, arguments: vec![], env: vec![], work });
    } else {
        println!("mariadb: not installed");
    }
    all
}

/// The program of that name may be a script that starts others before it.
fn real(program: PathBuf) -> PathBuf {
    if !program.ends_with("python3") {
        return program;
    }
    run(Command::new(&program).args(["-c", "import sys; print(sys.executable)"])).out.trim().into()
}
