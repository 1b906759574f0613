//! Plans for running programs of many kinds: static, stripped, with an allocator linked in or loaded late, in Go.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fragprof::allocator::Allocator;
use fragprof::probe::placement::Emulation;
use fragprof::probe::plan::{Plan, PlanError, Planner, plan};
use fragprof::process::Process;
use fragprof::units::Pid;
use tempfile::TempDir;

/// Allocates, writes one byte, and waits for input.
const PROGRAM: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
void *block;
int main(void) {
    char c;
    block = malloc(100);
    block = realloc(block, 200);
    free(block);
    while (write(1, "x", 1) == 1 && read(0, &c, 1) == 1)
        ;
}
"#;

/// Without a C library: writes a byte and waits with direct system calls.
const BARE_PROGRAM: &str = r#"
static long call(long n, long a, long b, long c) {
    long r;
    __asm__ volatile("syscall" : "=a"(r) : "a"(n), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return r;
}
#ifdef SECTION
__attribute__((section(SECTION), used)) static const char info[32] = "information";
#endif
void _start(void) {
    char c;
    call(1, 1, (long)"x", 1);
    call(0, 0, (long)&c, 1);
    call(60, 0, 0, 0);
}
"#;

/// Loads the library given as its argument when it reads a byte.
const LOADER: &str = r#"
#include <dlfcn.h>
#include <unistd.h>
int main(int argc, char **argv) {
    char c;
    write(1, "x", 1);
    read(0, &c, 1);
    if (!dlopen(argv[1], RTLD_NOW))
        return 1;
    write(1, "x", 1);
    read(0, &c, 1);
}
"#;

struct Program {
    directory: TempDir,
}

impl Program {
    fn compile(source: &str, compiler: &str, arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let source_path = directory.path().join("program.c");
        std::fs::write(&source_path, source).unwrap();
        let output = Command::new(compiler)
            .args(["-O0", "-w", "-o"])
            .arg(directory.path().join("program"))
            .arg(&source_path)
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Self { directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("program")
    }

    fn start(&self, arguments: &[&str]) -> Running {
        Self::start_by(Command::new(self.path()).args(arguments))
    }

    fn start_by(command: &mut Command) -> Running {
        let mut running = Running(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        running.answer();
        running
    }
}

struct Running(Child);

impl Running {
    fn answer(&mut self) {
        self.0.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    }

    fn ask(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"x").unwrap();
        self.answer();
    }

    fn process(&self) -> Process {
        Process::open(Pid(self.0.id())).unwrap()
    }

    fn plan(&self) -> Result<Plan, PlanError> {
        plan(&self.process(), Emulation::default())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The program's own file is the only one with an allocator, and serves it.
fn assert_serves_itself(program: &Program, allocator: Allocator) {
    let plan = program.start(&[]).plan().unwrap();
    let own: Vec<_> = plan.files.iter().filter(|f| f.display_path == program.path()).collect();
    assert_eq!(own.len(), 1, "{plan:?}");
    assert_eq!((own[0].allocator, own[0].serves_malloc), (allocator, true));
    for name in ["malloc", "free"] {
        let site = own[0].sites.iter().find(|s| s.function.name() == name).unwrap();
        assert!(site.placement.reason.is_emulated(), "{site:?}");
    }
}

#[test]
fn a_static_glibc_program_serves_itself() {
    assert_serves_itself(&Program::compile(PROGRAM, "cc", &["-static"]), Allocator::Glibc);
    assert_serves_itself(&Program::compile(PROGRAM, "cc", &["-static-pie"]), Allocator::Glibc);
}

#[test]
fn a_static_musl_program_serves_itself() {
    assert_serves_itself(&Program::compile(PROGRAM, "musl-gcc", &["-static"]), Allocator::Musl);
}

#[test]
fn a_dynamic_musl_program_is_served_by_its_loader() {
    let plan = Program::compile(PROGRAM, "musl-gcc", &[]).start(&[]).plan().unwrap();
    let [file] = &plan.files[..] else { panic!("{plan:?}") };
    assert_eq!((file.allocator, file.serves_malloc), (Allocator::Musl, true));
}

#[test]
fn a_program_given_to_its_loader_as_an_argument_is_served_as_usual() {
    let jemalloc = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2";
    for (compiler, loader, arguments, serving) in [
        ("cc", "/lib64/ld-linux-x86-64.so.2", &[][..], Allocator::Glibc),
        ("cc", "/lib64/ld-linux-x86-64.so.2", &["-Wl,--no-as-needed", jemalloc], Allocator::Jemalloc),
        ("musl-gcc", "/lib/ld-musl-x86_64.so.1", &[], Allocator::Musl),
    ] {
        let program = Program::compile(PROGRAM, compiler, arguments);
        let plan = Program::start_by(Command::new(loader).arg(program.path())).plan().unwrap();
        let serves: Vec<_> = plan.files.iter().filter(|file| file.serves_malloc).map(|file| file.allocator).collect();
        assert_eq!(serves, [serving], "{loader} {arguments:?}");
    }
}

#[test]
fn jemalloc_linked_into_a_program_serves_it() {
    let archive = "/usr/lib/x86_64-linux-gnu/libjemalloc_pic.a";
    assert_serves_itself(&Program::compile(PROGRAM, "cc", &[archive, "-lstdc++", "-lm", "-lpthread"]), Allocator::Jemalloc);
}

#[test]
fn a_second_allocator_with_prefixed_names_is_found_next_to_the_first() {
    let source = format!(
        "void *_rjem_malloc(unsigned long n) {{ return (void *)n; }}\nvoid *_rjem_mallocx(unsigned long n, int f) {{ return (void *)n; }}\n\
         void _rjem_sdallocx(void *p, unsigned long n, int f) {{}}\nvoid xml_free(void *p) {{}}\n{PROGRAM}"
    );
    let program = Program::compile(&source, "cc", &[]);
    let plan = program.start(&[]).plan().unwrap();
    let own = plan.files.iter().find(|f| f.display_path == program.path()).unwrap();
    let mut names: Vec<_> = own.sites.iter().map(|s| s.symbols[0].as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, ["_rjem_malloc", "_rjem_mallocx", "_rjem_sdallocx"]);
    assert_eq!((own.allocator, own.serves_malloc), (Allocator::Jemalloc, false));
    assert!(plan.files.iter().any(|f| f.allocator == Allocator::Glibc && f.serves_malloc));
}

#[test]
fn a_stripped_static_program_is_refused_with_the_likely_reason() {
    let error = Program::compile(PROGRAM, "cc", &["-static", "-s"]).start(&[]).plan().unwrap_err();
    assert!(matches!(error, PlanError::NoAllocator { .. }));
    assert!(error.to_string().contains("stripped static"), "{error}");
}

#[test]
fn a_go_program_without_a_c_library_is_reported_as_such() {
    let bare = ["-nostdlib", "-static", "-fno-stack-protector"];
    let with_section = [&bare[..], &["-DSECTION=\".go.buildinfo\""]].concat();
    let error = Program::compile(BARE_PROGRAM, "cc", &with_section).start(&[]).plan().unwrap_err();
    assert!(matches!(error, PlanError::GoWithoutLibc { .. }), "{error}");
    let error = Program::compile(BARE_PROGRAM, "cc", &bare).start(&[]).plan().unwrap_err();
    assert!(matches!(error, PlanError::NoAllocator { .. }), "{error}");
}

#[test]
fn an_allocator_loaded_late_is_in_the_next_plan() {
    let library = "/usr/lib/x86_64-linux-gnu/libmimalloc.so.2";
    let mut running = Program::compile(LOADER, "cc", &["-ldl"]).start(&[library]);
    let process = running.process();
    let mut planner = Planner::new(Emulation::default());
    let allocators = |plan: &Plan| plan.files.iter().map(|f| (f.allocator, f.serves_malloc)).collect::<Vec<_>>();
    assert_eq!(allocators(&planner.plan(&process).unwrap()), [(Allocator::Glibc, true)]);
    running.ask();
    let plan = planner.plan(&process).unwrap();
    // The program's own calls still go to the first.
    let mut found = allocators(&plan);
    found.sort_unstable();
    assert_eq!(found, [(Allocator::Glibc, true), (Allocator::Mimalloc, false)]);
    let path = std::fs::canonicalize(Path::new(library)).unwrap();
    assert!(plan.files.iter().any(|f| f.display_path == path && f.attach_path.exists()));
}

#[test]
fn a_process_that_has_ended_is_not_planned() {
    let mut running = Program::compile(PROGRAM, "cc", &[]).start(&[]);
    let process = running.process();
    running.0.kill().unwrap();
    running.0.wait().unwrap();
    assert!(matches!(plan(&process, Emulation::default()), Err(PlanError::Target(_))));
}
