//! Real programs, sampled from their start: all stacks together against the allocator's account, from outside (census) and from inside
//! (mallinfo2).

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::programs::{Environment, compile};
use super::report::{Estimates, Figure};
use crate::support::build::tool;
use crate::support::process::{Process, run, wait_until};
use crate::support::recording::fragprof;
use crate::support::{LIMIT, bpf, serial};

/// What the program prints once it has allocated everything and waits for input.
const READY: &str = "READY";
const SAMPLE_BYTES: u64 = 16 << 10;

/// The only child of a process.
fn child_of(pid: u32) -> u32 {
    let mut child = None;
    wait_until("the recorder has started the program", || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        let children = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok());
        child = children.flat_map(|text| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).find_map(|word| word.parse().ok());
        child.is_some()
    });
    child.unwrap()
}

/// Records a program from its start until it is ready, and compares.
fn check(folder: &Path, account: &Path, program: PathBuf, arguments: &[&str], input: &str, env: Environment<'_>) {
    let name = program.file_name().unwrap().to_string_lossy().into_owned();
    let out = folder.join(format!("{name}.pb.gz"));
    let mut command = fragprof();
    command.args(["record", "-d", "120s", "-o"]).arg(&out).arg("--").arg(env!("CARGO_BIN_EXE_fragprof"));
    // Without the limit on samples: the interval would depend on the machine's speed, and here the error must be small.
    command.args(["run", "--sample-bytes", &SAMPLE_BYTES.to_string(), "--samples-per-second", "0", "--"]).arg(&program).args(arguments);
    command.envs(env.iter().copied()).env("LD_PRELOAD", account);
    let mut recording = Process::start_piped(&mut command);
    let mut stdin = recording.input();
    std::io::Write::write_all(&mut stdin, input.as_bytes()).unwrap();
    assert!(recording.out.wait_for(LIMIT, |line| line.contains(READY)).is_some(), "{name}:\n{}\n{}", recording.out, recording.err);
    let pid = child_of(recording.pid());
    let asleep = || std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") S "));
    wait_until("the program waits", asleep);
    let signal = format!("-{}", libc::SIGRTMIN() + 5);
    assert!(Command::new("kill").args([&signal, &pid.to_string()]).status().unwrap().success());
    let said = recording.err.wait_for(LIMIT, |line| line.contains("mallinfo2 ")).unwrap();
    let inside: f64 = said.split_whitespace().last().unwrap().parse().unwrap();
    recording.signal(rustix::process::Signal::INT);
    assert!(recording.wait(LIMIT).success(), "{name}: {}", recording.err.all());
    drop(stdin);

    let report = Estimates::read(&out);
    let processes = report.0["processes"].as_array().unwrap();
    let process = processes.iter().find(|process| process["pid"] == pid).unwrap_or_else(|| panic!("{name}: {processes:?}"));
    assert!(process["source"].as_str().is_some_and(|source| source.contains("otel_memory")), "{name}: {}", report.said());
    let census = process["live_bytes"].as_f64().unwrap_or_else(|| panic!("{name}: {}", report.said()));
    // Only of this process: shells that started it have rows of their own.
    let told = report.of_process("live_bytes", pid);
    let rest = Figure { est: census - told.est, stderr: told.stderr };
    println!(
        "{name:<10} census {:>6.2} MiB, mallinfo2 {:>6.2} MiB, by stack {:>6.2} ±{:.2} MiB, {} samples",
        census / 1048576.0,
        inside / 1048576.0,
        told.est / 1048576.0,
        1.96 * rest.stderr / 1048576.0,
        process["samples"],
    );
    // malloc counts blocks in its thread caches as in use; the census does not.
    assert!((0.90..1.03).contains(&(census / inside)), "{name}: census {census}, mallinfo2 {inside}");
    // Nothing is unexplained by stacks, within the error (3.5 standard errors, as there are several programs), except what ld.so and libc
    // allocate before the library is loaded.
    assert!(
        rest.est.abs() < 3.5 * rest.stderr + 0.01 * census + 100_000.0,
        "{name}: {rest:?} of {census} not explained: {}",
        report.said()
    );
    assert!(rest.stderr < 0.2 * census, "{name}: {rest:?}");
}

#[test]
fn all_stacks_together_equal_the_allocators_account_from_outside_and_from_inside() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let folder = TempDir::new().unwrap();
    let account = compile(folder.path(), "account.c", "account.so", &["-O2", "-shared", "-fPIC"]);
    let sql = "create table t(a integer primary key, b text);\nwith recursive n(i) as (select 1 union all select i+1 from n where i < 60000) \
               insert into t select i, hex(zeroblob(i%100)) from n;\nselect 'REA' || 'DY';\n";
    let python = "import sys\nkeep = [str(i) * (i % 50) for i in range(60000)]\nprint('READY', flush=True)\nsys.stdin.read()";
    let perl = "$| = 1; my @keep = map { 'x' x ($_ % 300) } 1..60000; print \"READY\\n\"; <STDIN>;";
    let node =
        "const keep = []; for (let i = 0; i < 300; i++) keep.push(Buffer.alloc(20000 + i)); console.log('READY'); process.stdin.resume();";
    let awk =
        "BEGIN { for (i = 0; i < 60000; i++) keep[i] = i \"abcdefghijklmnopqrstuvwxyz\"; print \"READY\"; fflush(); getline < \"-\" }";
    let java = folder.path().join("Hold.java");
    std::fs::write(
        &java,
        "import java.nio.ByteBuffer;\nclass Hold { static ByteBuffer[] keep = new ByteBuffer[400];\n public static void main(String[] a) \
         throws Exception { for (int i = 0; i < 400; i++) keep[i] = ByteBuffer.allocateDirect(20000 + i);\n \
         System.out.println(\"READY\"); System.in.read(); } }",
    )
    .unwrap();
    let programs: [(&str, &[&str], &str, Environment<'_>); 7] = [
        ("sqlite3", &["-interactive", ":memory:"], sql, &[]),
        ("python3", &["-c", python], "", &[("PYTHONMALLOC", "malloc")]),
        ("perl", &["-e", perl], "", &[]),
        ("node", &["-e", node], "", &[]),
        ("gawk", &[awk], "", &[]),
        (
            "gdb",
            &["-q", "-nx", "-iex", "set debuginfod enabled off", "-ex", "info line malloc", "-ex", "echo READY\\n", "/proc/self/exe"],
            "",
            &[],
        ),
        ("java", &["-Xmx64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", java.to_str().unwrap()], "", &[]),
    ];
    let mut checked = 0;
    for (name, arguments, input, env) in programs {
        let Some(mut program) = tool(name) else { continue };
        if name == "python3" {
            // The program of that name may be a script that starts others before it.
            let said = run(Command::new(&program).args(["-c", "import sys; print(sys.executable)"])).out;
            program = PathBuf::from(said.trim());
        }
        check(folder.path(), &account, program, arguments, input, env);
        checked += 1;
    }
    assert!(checked >= 6, "{checked} programs are installed");
}
