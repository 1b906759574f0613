//! What sampling by call site is worth on real programs: the error of the largest live stacks, with one distance and with one for each call
//! site, against a recording of every call of the same run. A measurement:
//!
//! ```text
//! make bench-strata
//! ```

use std::collections::HashMap;
use std::io::Write as _;
use std::process::{ChildStdin, Command};

use fragprof::profile::pprof;
use fragprof::profile::{Profile, ValueKind};
use tempfile::TempDir;

use super::workloads::wait_for_idle;
use crate::support::LIMIT;
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::{Recording, fragprof};

/// Runs of each program, in each way.
const RUNS: usize = 3;
/// Units of work in a run.
const UNITS: usize = 8;
/// Stacks that are compared, the largest first.
const LARGEST: usize = 10;
/// Shorter than the usual distance, as the heaps are smaller than a service's.
pub(crate) const SAMPLE_BYTES: u64 = 32 << 10;

/// A cache that turns over, lists that grow, and requests whose objects die at once.
const PYTHON: &str = "
import json, sys
cache, log, names, n = {}, [], [], 0
for line in sys.stdin:
    for i in range(300):
        n += 1
        request = json.loads(json.dumps([{'k%d' % j: [j] * 5, 'v': str(j) * 3} for j in range(20)]))
        cache[n % 1500] = {'name': 'entry %d' % n, 'parts': [str(i)] * 4, 'body': bytes(1000)}
        log.append((n, 'request %d' % n, len(request)))
        if i % 4 == 0:
            names.append('x' * 900 + str(n))
    print('DONE', flush=True)
";
/// Direct buffers that are kept, some that are not, and deflaters.
const JAVA: &str = "
import java.nio.ByteBuffer;
import java.util.*;
import java.util.zip.*;
class Kept {
  static List<ByteBuffer> pages = new ArrayList<>(), index = new ArrayList<>();
  static List<Deflater> open = new ArrayList<>();
  static ByteBuffer page(int i) { return ByteBuffer.allocateDirect(3000 + i % 7); }
  static ByteBuffer entry(int i) { return ByteBuffer.allocateDirect(200 + i % 5); }
  static ByteBuffer scratch(int i) { return ByteBuffer.allocateDirect(5000 + i % 3); }
  public static void main(String[] a) throws Exception {
    byte[] text = new byte[20000], out = new byte[40000];
    int n = 0;
    while (System.in.read() >= 0) {
      for (int r = 0; r < 300; r++, n++) {
        Deflater d = new Deflater(1); d.setInput(text); d.finish(); d.deflate(out);
        if (r % 60 == 0) open.add(d); else d.end();
        for (int i = 0; i < 30; i++) ((sun.nio.ch.DirectBuffer) scratch(i)).cleaner().clean();
        pages.add(page(n));
        if (pages.size() > 900) ((sun.nio.ch.DirectBuffer) pages.remove(0)).cleaner().clean();
        for (int i = 0; i < 3; i++) index.add(entry(i));
      }
      System.out.println(\"DONE\");
    }
  }
}
";
/// Prepared statements and temporary tables that stay, and queries whose memory goes.
const SQL: &str = "prepare p$N as select t.b, count(*) from t join t u on t.i = u.i where t.i > $1 group by t.b order by 2\n\
    create temp table t$N as select i, md5(i::text) as b from generate_series(1, 500) i\n\
    select count(*) from (select b, string_agg(i::text, ',') from t group by substr(b, 1, 3), b order by b) s\n\
    select count(*) from (select jsonb_build_object('k', b, 'v', i) -> 'k' from t) s\n\
    select 'DO' || 'NE' as answer\n";

enum Load {
    Lines(&'static str),
    Redis(std::path::PathBuf),
}

/// Starts another command with the sampler.
fn sampled() -> Command {
    let mut command = fragprof();
    command.args(["run", "--sample-bytes", &SAMPLE_BYTES.to_string(), "--"]);
    command
}

/// A program that works on demand.
pub(crate) struct Service {
    pub(crate) process: Process,
    input: ChildStdin,
    load: Load,
    done: usize,
    unit: usize,
    _folder: TempDir,
}

impl Service {
    /// Started with the sampler in it, or without.
    pub(crate) fn start(name: &str, sampler: bool) -> Option<Self> {
        Self::start_by(name, if sampler { sampled() } else { Command::new("env") })
    }

    /// Started by a command that takes another one.
    fn start_by(name: &str, mut command: Command) -> Option<Self> {
        let folder = TempDir::new().unwrap();
        let load = match name {
            "redis" => {
                let socket = folder.path().join("redis.sock");
                command.arg(tool("redis-server")?).args(["--port", "0", "--save", "", "--appendonly", "no", "--dir"]).arg(folder.path());
                command.arg("--unixsocket").arg(&socket);
                Load::Redis(socket)
            }
            "python" => {
                let python = run(Command::new(tool("python3")?).args(["-c", "import sys; print(sys.executable)"])).out;
                command.arg(python.trim()).args(["-u", "-c", PYTHON]).env("PYTHONMALLOC", "malloc");
                Load::Lines("\n")
            }
            "java" => {
                let source = folder.path().join("Kept.java");
                std::fs::write(&source, JAVA).unwrap();
                // What it keeps grows with every unit of work; long tests ask for thousands.
                command.arg(tool("java")?).args(["-Xmx256m", "-XX:MaxDirectMemorySize=8g", "-XX:+UseSerialGC"]);
                command.args(["--add-exports=java.base/sun.nio.ch=ALL-UNNAMED", "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED"]);
                command.arg(source);
                Load::Lines("\n")
            }
            _ => {
                let (program, arguments) = super::databases::postgres_backend()?;
                command.arg(program).args(arguments).arg("-D").arg(super::databases::postgres(folder.path(), 1)).arg("postgres");
                Load::Lines(SQL)
            }
        };
        let mut process = Process::start_piped(&mut command);
        let input = process.input();
        let mut service = Self { process, input, load, done: 0, unit: 0, _folder: folder };
        if let Load::Redis(socket) = &service.load {
            wait_until("redis listens", || socket.exists());
        } else if name == "postgres" {
            let first =
                "create temp table t as select i, md5(i::text) as b from generate_series(1, 4000) i\nselect 'DO' || 'NE' as answer\n";
            service.input.write_all(first.as_bytes()).unwrap();
            service.wait_for_answer();
        }
        Some(service)
    }

    fn wait_for_answer(&mut self) {
        loop {
            let line = self.process.out.nth(self.done, LIMIT);
            self.done += 1;
            if line.unwrap_or_else(|| panic!("{}", self.process.err)).contains("DONE") {
                break;
            }
        }
        wait_for_idle(&self.process);
    }

    pub(crate) fn work(&mut self) {
        self.unit += 1;
        match &self.load {
            Load::Lines(unit) => {
                let unit = unit.replace("$N", &self.unit.to_string());
                self.input.write_all(unit.as_bytes()).unwrap();
                self.wait_for_answer();
            }
            Load::Redis(socket) => {
                let done = run(Command::new("redis-benchmark")
                    .arg("-s")
                    .arg(socket)
                    .args(["-q", "-n", "6000", "-r", "8000", "-d", "300"])
                    .args(["-c", "20", "-t", "set,get,lpush,sadd,hset,zadd"]));
                assert!(done.status.success(), "{}", done.err);
                wait_for_idle(&self.process);
            }
        }
    }
}

/// Live bytes by stack: names of functions, without the allocator's and the sampler's.
fn live_by_stack(profile: &Profile) -> HashMap<Vec<String>, f64> {
    const ALLOCATOR: [&str; 8] = ["malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc", "memalign", "mallocx", "rallocx"];
    let mut live: HashMap<Vec<String>, f64> = HashMap::new();
    for stack in profile.stacks().iter().filter(|stack| !profile.is_rest(stack)) {
        let outside = profile.frames_of(stack).filter(|frame| !frame.module.contains("libfragprof_sampler"));
        let frames = outside.skip_while(|frame| ALLOCATOR.iter().any(|name| frame.function.trim_start_matches("__libc_") == *name));
        // Line tables may differ by an instruction between a return address and an entry.
        let key: Vec<String> = frames.map(|frame| frame.function.to_string()).collect();
        *live.entry(key).or_default() += stack.values.get(ValueKind::InuseSpace) as f64;
    }
    live
}

/// Relative errors of the largest stacks, the number of samples, and the share of the truth that they are.
fn errors(name: &str, by_site: bool) -> Option<(Vec<f64>, f64, f64)> {
    let mut command = sampled();
    if !by_site {
        command.env("FRAGPROF_SAMPLE_BY_SITE", "0");
    }
    let mut service = Service::start_by(name, command)?;
    let pid = service.process.pid();
    let attach = |mode: &str| Recording::attach_by(fragprof(), &[pid], &["--mode", mode]);
    let (every_call, sampled) = (attach("exact"), attach("sampled"));
    for _ in 0..UNITS {
        service.work();
    }
    let profile = |mut recording: Recording| {
        recording.process.signal(rustix::process::Signal::INT);
        assert!(recording.wait(LIMIT).success(), "{}", recording.process.err.all());
        pprof::read_file(&recording.file()).unwrap()
    };
    let (sampled, every_call) = (profile(sampled), profile(every_call));
    let samples = sampled.meta.processes.iter().filter_map(|process| process.samples).sum::<u64>() as f64;
    let (told, truth) = (live_by_stack(&sampled), live_by_stack(&every_call));
    let mut largest: Vec<(&Vec<String>, f64)> = truth.iter().map(|(stack, &bytes)| (stack, bytes)).collect();
    largest.sort_by(|one, other| other.1.total_cmp(&one.1));
    largest.truncate(LARGEST);
    let all: f64 = truth.values().sum();
    let known: f64 = told.iter().filter(|(stack, _)| truth.contains_key(*stack)).map(|(_, bytes)| bytes).sum();
    let share = known / told.values().sum::<f64>().max(1.0);
    println!(
        "  {name} {}: {samples} samples, {:.1} MiB live, {:.0} % of the sampled bytes in stacks of the other",
        if by_site { "by site" } else { "one" },
        all / 1048576.0,
        share * 100.0
    );
    if std::env::var_os("FRAGPROF_STRATA").is_some() {
        for (stack, bytes) in &largest {
            println!(
                "    {:.2} MB, {:.2} told: {}",
                bytes / 1e6,
                told.get(*stack).copied().unwrap_or(0.0) / 1e6,
                stack[..stack.len().min(4)].join(" ")
            );
        }
    }
    let error = |(stack, bytes): &(&Vec<String>, f64)| (told.get(*stack).copied().unwrap_or(0.0) - bytes).abs() / bytes;
    Some((largest.iter().map(error).collect(), samples, largest.iter().map(|(_, bytes)| bytes).sum::<f64>() / all))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[test]
#[ignore = "a measurement: make bench-strata"]
fn errors_of_the_largest_live_stacks_of_real_programs() {
    let mut lines = Vec::new();
    let only = std::env::var("FRAGPROF_STRATA").ok();
    for name in ["redis", "postgres", "python", "java"].into_iter().filter(|name| only.as_ref().is_none_or(|only| only == name)) {
        let mut of = [(Vec::new(), 0.0, 0.0), (Vec::new(), 0.0, 0.0)];
        for _ in 0..RUNS {
            for by_site in [false, true] {
                let Some((errors, samples, share)) = errors(name, by_site) else { continue };
                let into = &mut of[usize::from(by_site)];
                into.0.extend(errors);
                into.1 += samples / RUNS as f64;
                into.2 += share / RUNS as f64;
            }
        }
        let [one, by_site] = &mut of;
        let (before, after) = (median(&mut one.0), median(&mut by_site.0));
        lines.push(format!(
            "| {name} | {:.0} | {:.0} | {:.0} % | {:.0} % | {:.0} % | {:.1} |",
            one.1,
            by_site.1,
            one.2 * 100.0,
            before * 100.0,
            after * 100.0,
            before / after
        ));
    }
    println!(
        "| program | samples, one distance | by site | share of the ten largest stacks | median error, one distance | by site | ratio \
         |\n|---|---|---|---|---|---|---|\n{}",
        lines.join("\n")
    );
}
