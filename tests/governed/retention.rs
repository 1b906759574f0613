//! Retention flags and confirmed bytes of real programs, compared with a ledger that is preloaded into each.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fragprof::governor::retention::{TOLD_AGE_NS, Verdict, kept};
use fragprof::session::tier::windows::{Governed, Options};
use fragprof::units::{Pid, StackId};
use rustix::process::Signal;

use super::output;
use crate::support::build::LIB_DIR;
use crate::support::process::{Process, run, wait_until};
use crate::support::{bpf, serial};

/// `ROWS` of ledger.c.
const ROWS: u64 = 1 << 22;
const ROW_BYTES: u64 = 16;
/// Too small for any of the programs to be traced in full, even if they get little CPU time on a busy machine.
const BUDGET: f64 = 0.01;
/// The same for the long form, with more windows: the programs run for a twentieth of the time, and budgets are shares of that.
const LONG_BUDGET: f64 = 0.04;
/// Maximum difference between a block's time of allocation in the ledger and in a record: windows check only older blocks, so the next
/// block at the same address is allocated later than this.
const BIRTH_APART_NS: u64 = 4_500_000;

const JEMALLOC: &str = "libjemalloc.so.2";

/// The allocator of a watched program.
#[derive(Debug, Clone, Copy)]
enum Heap {
    Glibc,
    /// A library of this name, preloaded.
    Preloaded(&'static str),
    Musl,
}

impl Heap {
    fn compiler(self) -> &'static str {
        if matches!(self, Self::Musl) { "musl-gcc" } else { "cc" }
    }

    fn ledger_library(self) -> PathBuf {
        self.built("ledger.c", &["-fno-builtin", "-shared", "-fPIC"])
    }

    /// Compiles a source of this directory for this allocator's C library.
    fn built(self, source: &str, flags: &[&str]) -> PathBuf {
        let compiler = self.compiler();
        output(&format!("governed-{compiler}-{source}.built"), |fresh| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/governed").join(source);
            let done = run(Command::new(compiler).args(["-O2", "-g"]).args(flags).arg("-o").arg(fresh).arg(&source));
            assert!(done.status.success(), "{}", done.err);
        })
    }

    fn preload(self) -> String {
        let ledger = self.ledger_library().display().to_string();
        // The ledger comes first, and forwards to the allocator.
        if let Self::Preloaded(library) = self { format!("{ledger}:{LIB_DIR}/{library}") } else { ledger }
    }
}

/// A program with the preloaded ledger.
struct Watched {
    name: String,
    process: Process,
    /// The process that writes its input.
    feeder: Option<Child>,
    ledger: File,
    _dir: tempfile::TempDir,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(feeder) = &mut self.feeder {
            feeder.kill().unwrap();
            feeder.wait().unwrap();
        }
    }
}

impl Watched {
    fn start(heap: Heap, program: &str, args: &[&str], line: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ledger");
        let ledger = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
        ledger.set_len(ROWS * ROW_BYTES).unwrap();
        let mut command = Command::new(program);
        command.args(args).env("LD_PRELOAD", heap.preload()).env("LEDGER_FILE", &path).env("PYTHONMALLOC", "malloc");
        // A line every 10 ms.
        let feed = |line: &str| {
            let perl = "$|=1;while(1){print \"$ARGV[0]\\n\";select undef,undef,undef,0.01}";
            Command::new("perl").args(["-e", perl, line]).stdout(Stdio::piped()).spawn().unwrap()
        };
        let mut feeder = line.map(feed);
        command.stdin(feeder.as_mut().map_or(Stdio::null(), |feeder| feeder.stdout.take().unwrap().into()));
        let name = format!("{heap:?} {}", program.rsplit('/').next().unwrap_or(program));
        Self { name, process: Process::start_fed(&mut command), feeder, ledger, _dir: dir }
    }

    /// When the block at an address was allocated; 0 = there is none.
    fn born_ns(&self, addr: u64) -> u64 {
        let mut at = (addr >> 4).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 42;
        for _ in 0..1024 {
            let mut row = [0; ROW_BYTES as usize];
            self.ledger.read_exact_at(&mut row, at * ROW_BYTES).unwrap();
            let word = |at: usize| u64::from_ne_bytes(row[at..at + 8].try_into().unwrap());
            if at != 0 && word(0) == addr {
                return word(8);
            }
            if at != 0 && word(0) == 0 {
                return 0;
            }
            at = (at + 1) % ROWS;
        }
        0
    }

    fn lives(&self, one: &Verdict<StackId>) -> bool {
        let born_ns = self.born_ns(one.addr);
        born_ns != 0 && born_ns < one.born_ns + BIRTH_APART_NS
    }
}

/// Programs that churn, cache, keep for some seconds, and leak, a few thousand allocations at a time.
fn programs(heap: Heap) -> Vec<Watched> {
    let python = "import collections,random,time,json\n\
        leak=[];cache=collections.OrderedDict();recent=collections.deque()\n\
        while True:\n\
        \x20for i in range(40):\n\
        \x20 key='user:%d'%random.randrange(4000)\n\
        \x20 cache[key]={'name':'n%d'%random.getrandbits(60),'tags':[str(random.getrandbits(50)) for _ in range(4)]}\n\
        \x20 cache.move_to_end(key)\n\
        \x20 if len(cache)>3000: cache.popitem(last=False)\n\
        \x20 text=json.dumps(cache[key]);json.loads(text)\n\
        \x20leak.extend({'id':random.getrandbits(60),'note':'x%d'%random.getrandbits(80)} for _ in range(8))\n\
        \x20recent.append((time.monotonic(),[bytes(random.randbytes(200)) for _ in range(5)]))\n\
        \x20while recent and recent[0][0]<time.monotonic()-8: recent.popleft()\n\
        \x20time.sleep(0.01)\n";
    let perl = "my (%cache,@leak,@order);while(1){for(1..60){my $k='k'.int(rand(5000));push @order,$k unless $cache{$k};\
        $cache{$k}={name=>'n'.rand(),list=>[map{rand().'s'}1..5]};my $t=join ',',map{\"$_=$cache{$k}{name}\"}1..6;my @p=split /,/,$t;\
        if(@order>3000){delete $cache{shift @order}}}push @leak,map{{id=>rand(),text=>'t'.rand()x3}}1..8;select undef,undef,undef,0.01}";
    let gawk = "{for(i=0;i<80;i++){k=\"k\" int(rand()*5000);if(!(k in c)){j=h%3000;if(h>=3000)delete c[o[j]];o[j]=k;h++};\
        v=rand() \":\" rand() \":\" rand();c[k]=v;n=split(v,part,\":\");t=t part[1] part[n]};if(length(t)>20000)t=\"\";\
        for(i=0;i<10;i++)l[++m]=\"leak\" rand() rand()}";
    let node = "const z=require('zlib');const leak=[],cache=new Map(),recent=[];setInterval(()=>{for(let i=0;i<12;i++){\
        const k=(Math.random()*500)|0;cache.set(k,Buffer.allocUnsafeSlow(100+(Math.random()*3000|0)).fill(Math.random().toString()));\
        z.deflateSync(cache.get(k))}for(let i=0;i<4;i++)leak.push(Buffer.allocUnsafeSlow(600).fill(Math.random().toString()));\
        recent.push([Date.now(),Buffer.allocUnsafeSlow(900).fill(Math.random().toString())]);\
        while(recent.length&&recent[0][0]<Date.now()-8000)recent.shift()},10)";
    let bash = "declare -A c;while read -r line;do for i in {1..40};do k=k$((RANDOM%3000));c[$k]=\"$RANDOM:$RANDOM:$RANDOM\";v=${c[$k]};\
        p=(${v//:/ });done;for i in {1..8};do leak+=(\"note $RANDOM $RANDOM $RANDOM $RANDOM\");done;done";
    let sql = "INSERT INTO t SELECT abs(random())%9000,hex(randomblob(80)) FROM (SELECT 1 UNION SELECT 2 UNION SELECT 3);\
        DELETE FROM t WHERE rowid<(SELECT max(rowid)-20000 FROM t);SELECT count(*),group_concat(substr(b,1,9)) FROM \
        (SELECT b FROM t ORDER BY b LIMIT 60);INSERT INTO kept SELECT hex(randomblob(60));";
    vec![
        Watched::start(heap, "/usr/bin/python3", &["-c", python], None),
        Watched::start(heap, "perl", &["-e", perl], None),
        Watched::start(heap, "gawk", &[gawk], Some("line")),
        Watched::start(heap, "node", &["-e", node], None),
        Watched::start(heap, "bash", &["-c", bash], Some("line")),
        Watched::start(
            heap,
            "sqlite3",
            &["-cmd", "CREATE TABLE t(a,b);CREATE TABLE kept(b);CREATE INDEX i ON t(b);", ":memory:"],
            Some(sql),
        ),
    ]
}

/// Blocks that the reports on these programs would have now.
fn reported(governed: &mut Governed, programs: &[Watched]) -> usize {
    let verdicts = programs.iter().flat_map(|program| governed.verdicts(Pid(program.process.pid())));
    let now_ns = now_ns();
    verdicts.filter(|one| one.informative && now_ns - one.born_ns >= TOLD_AGE_NS).count()
}

/// Watches all of them at once for this long, and for up to three times as long until `wanted` blocks can be reported; then stops them
/// and compares the reports with the ledgers. Returns how many blocks of each were reported.
fn compare_with_ledgers(programs: &[Watched], budget: f64, seconds: u64, wanted: usize) -> Vec<usize> {
    let mut governed = Governed::new(Options { own_census: false, ..Options::default() }).unwrap();
    for program in programs {
        let pid = Pid(program.process.pid());
        // It may not have loaded its libraries yet.
        wait_until(&program.name, || {
            assert!(program.process.err.to_string().is_empty(), "{}: {}", program.name, program.process.err);
            governed.watch(pid, budget).is_ok()
        });
    }
    governed.wait_for_tables(Duration::from_secs(20));
    let began = Instant::now();
    let (least, most) = (Duration::from_secs(seconds), Duration::from_secs(3 * seconds));
    while began.elapsed() < least || (began.elapsed() < most && reported(&mut governed, programs) < wanted) {
        governed.step(Duration::from_millis(500));
    }
    for status in governed.status() {
        println!("{} windows of pid {}, {:.1} s in full", status.windows, status.pid, status.full_s);
    }
    let (mut checked, mut flags, mut sites, mut above) = (Vec::new(), 0, 0, 0);
    for program in programs {
        program.process.signal(Signal::STOP);
        let stat = format!("/proc/{}/stat", program.process.pid());
        wait_until("it is stopped", || std::fs::read_to_string(&stat).unwrap().contains(") T "));
        let verdicts = governed.verdicts(Pid(program.process.pid()));
        let now_ns = now_ns();
        let old: Vec<&Verdict<StackId>> = verdicts.iter().filter(|one| now_ns - one.born_ns >= TOLD_AGE_NS).collect();
        let mut truth: HashMap<StackId, (u64, u64, u64)> = HashMap::new();
        let (mut same, mut mistaken, mut alive) = (0, 0, 0);
        for one in &old {
            let lives = program.lives(one);
            let of = truth.entry(one.stack).or_default();
            *of = (of.0 + 1, of.1 + u64::from(lives), of.2 + if lives { one.bytes } else { 0 });
            alive += u64::from(lives);
            same += u64::from(one.informative && one.same);
            mistaken += u64::from(one.informative && one.same && !lives);
        }
        let informative = old.iter().filter(|one| one.informative).count();
        checked.push(informative);
        let mut raised = 0;
        for (stack, kept) in kept(verdicts.iter().copied(), now_ns) {
            let (sampled, live, live_bytes) = truth[&stack];
            if kept.is_flagged() {
                raised += 1;
                assert!(live * 10 >= sampled, "{}: a flag is wrong: {kept:?}, {live} of {sampled} live", program.name);
            }
            if kept.confirmed_bytes > 0 {
                sites += 1;
                above += u64::from(kept.confirmed_bytes > live_bytes);
            }
        }
        flags += raised;
        println!(
            "{:40} {:5} sampled {:5} of 20 s or more, {informative:5} informative, {alive:5} live, {same:4} same, {mistaken:3} of them wrong; \
             {raised:3} flags of {:3} stacks",
            program.name,
            verdicts.len(),
            old.len(),
            truth.len()
        );
        program.process.signal(Signal::CONT);
    }
    println!("{flags} flags, none wrong; confirmed bytes of {sites} stacks, {above} above the bytes of sampled blocks that are live");
    assert!(above * 20 <= sites, "of {sites} stacks with confirmed bytes {above} are above the truth");
    checked
}

fn now_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// A program of ours, because Debian has none with musl.
#[test]
fn survivors_in_the_heaps_of_musl_and_jemalloc_are_checked_again() {
    if bpf().is_some() {
        let _alone = serial();
        let start = |heap: Heap| Watched::start(heap, &heap.built("keeps.c", &[]).display().to_string(), &[], None);
        // One after the other, and with a larger budget: they run for a part of the time, and windows are few and far between.
        for program in [Heap::Musl, Heap::Preloaded(JEMALLOC)].map(start) {
            let [checked] = compare_with_ledgers(&[program], 3.0 * LONG_BUDGET, 26, 40)[..] else { panic!("one program") };
            assert!(checked >= 20, "only {checked} blocks were reported");
        }
    }
}

/// jemalloc's data are found by a thread that has a cache: without any the report must not say that survivors are checked.
#[test]
fn a_report_says_whether_jemallocs_data_were_found() {
    if bpf().is_none() {
        return;
    }
    let _alone = serial();
    let library = format!("{LIB_DIR}/{JEMALLOC}");
    for (settings, is_found) in [("tcache:false", false), ("tcache:true", true)] {
        let mut command = Command::new(Heap::Glibc.built("keeps.c", &[]));
        let program = Process::start(command.env("LD_PRELOAD", &library).env("MALLOC_CONF", settings));
        let mut governed = Governed::new(Options { own_census: false, ..Options::default() }).unwrap();
        wait_until("it is watched", || governed.watch(Pid(program.pid()), LONG_BUDGET).is_ok());
        wait_until("survivors are checked, or it says why not", || {
            governed.step(Duration::from_millis(500));
            let meta = governed.profile(None).meta;
            let checks = meta.limits.iter().any(|limit| limit.starts_with("some survivors are checked again"));
            let gives_up = meta.notes.iter().any(|note| note.contains("jemalloc's data were not found"));
            assert!(!if is_found { gives_up } else { checks }, "{settings}: {meta:?}");
            checks || gives_up
        });
    }
}

#[test]
fn no_retention_flag_of_six_real_programs_is_wrong() {
    if bpf().is_some() {
        let _alone = serial();
        // On a busy machine there may be too little time to check any block: what is reported must be right, and may be nothing.
        compare_with_ledgers(&programs(Heap::Glibc), BUDGET, 26, 0);
    }
}

/// The long form: `make retention`.
#[test]
#[ignore = "takes minutes"]
fn no_retention_flag_of_six_real_programs_is_wrong_after_a_minute() {
    if bpf().is_some() {
        let _alone = serial();
        let preloaded = [JEMALLOC, "libtcmalloc_minimal.so.4", "libmimalloc.so.2.0"].map(Heap::Preloaded);
        for heap in std::iter::once(Heap::Glibc).chain(preloaded) {
            let checked: usize = compare_with_ledgers(&programs(heap), LONG_BUDGET, 65, 200).iter().sum();
            assert!(checked >= 200, "{heap:?}: only {checked} blocks were reported");
        }
    }
}
