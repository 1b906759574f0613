//! A replayed allocator is foreign code: it can do no harm, and its crash or hang is a row in the table.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use fragprof::trace::{Header, How, Names, Writer};
use tempfile::TempDir;

use super::{of, report};

/// A trace with some blocks, and a library made of C code in front of an allocator that only takes.
fn prepare(directory: &TempDir, code: &str) -> (PathBuf, PathBuf) {
    const ALLOCATOR: &str = r"
        #include <stddef.h>
        #include <string.h>
        #include <errno.h>
        #include <sys/mman.h>
        static char *at, *end;
        static void called(void);
        void *malloc(size_t n) {
            called();
            n = (n + 31) & ~15ul;
            if (at + n > end) {
                size_t more = n > 1 << 20 ? n : 1 << 20;
                at = mmap(0, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                end = at + more;
            }
            *(size_t *)at = n;
            at += n;
            return at - n + 16;
        }
        void free(void *p) { (void)p; }
        void *calloc(size_t a, size_t b) { return malloc(a * b); }
        void *realloc(void *p, size_t n) { void *q = malloc(n); if (p) memcpy(q, p, n); return q; }
        int posix_memalign(void **p, size_t a, size_t n) { char *q = malloc(n + a); *p = (void *)(((size_t)q + a - 1) & -a); return 0; }
    ";
    let (source, library, trace) =
        (directory.path().join("library.c"), directory.path().join("library.so"), directory.path().join("trace.fpt"));
    std::fs::write(&source, format!("{ALLOCATOR}\n{code}")).unwrap();
    let built = Command::new("cc").args(["-O1", "-w", "-fPIC", "-shared", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(built.success());
    let mut bytes = Vec::new();
    let mut writer = Writer::new(&mut bytes, &Header::default(), u64::MAX).unwrap();
    for block in 0..5000u64 {
        writer.alloc((1 + block as u32 % 3, block * 20_000), 0x1000 + block * 64, 1, 100 + block % 900, How::default()).unwrap();
    }
    writer.finish(&Names::default(), &[]).unwrap();
    std::fs::write(&trace, bytes).unwrap();
    (trace, library)
}

fn row(trace: &Path, library: &Path) -> serde_json::Value {
    let path = library.to_str().unwrap();
    of(&report(trace, &["--under", path, "--time-limit", "10s"]), path).clone()
}

#[test]
fn an_allocator_of_ones_own_is_measured() {
    let directory = TempDir::new().unwrap();
    let (trace, library) = prepare(&directory, "static void called(void) {}");
    let row = row(&trace, &library);
    assert!(row["failed"].is_null(), "{row}");
    // 5000 blocks of 549.5 bytes on average, with 16 before each and rounding, none freed.
    let end = row["peak_bytes"].as_f64().unwrap();
    let expected = 5000.0 * (549.5 + 16.0 + 7.5);
    assert!((end / expected - 1.0).abs() < 0.12, "{end} against {expected}");
}

#[test]
fn an_allocator_that_crashes_or_hangs_is_a_row() {
    for (code, words) in [
        ("static int n; static void called(void) { if (++n == 1000) *(volatile int *)8 = 1; }", "crashed (signal 11)"),
        ("static int n; static void called(void) { while (n == 1000); n++; }", "takes more than"),
        ("static int n; void _exit(int); static void called(void) { if (++n == 1000) _exit(3); }", "ended with status 3"),
        ("void no_such_function(void); static void called(void) { no_such_function(); }", ""),
    ] {
        let directory = TempDir::new().unwrap();
        let (trace, library) = prepare(&directory, code);
        let began = Instant::now();
        let row = row(&trace, &library);
        assert!(row["failed"].as_str().is_some_and(|reason| reason.contains(words)), "{code}: {row}");
        assert!(began.elapsed().as_secs() < 60);
    }
}

#[test]
fn an_allocator_cannot_write_files_start_processes_or_reach_the_network() {
    let directory = TempDir::new().unwrap();
    let code = r#"
        #include <unistd.h>
        #include <fcntl.h>
        #include <signal.h>
        #include <sys/socket.h>
        #include <sys/stat.h>
        #include <stdio.h>
        static int done;
        static void fail(const char *what) { write(2, what, strlen(what)); _exit(40); }
        __attribute__((constructor)) static void tries(void) {
            if (open("harm", O_CREAT | O_WRONLY, 0600) >= 0 || open("library.c", O_RDWR) >= 0) fail("it wrote a file\n");
            if (!mkdir("harm", 0700) || !unlink("library.c") || !rename("library.c", "harm")) fail("it changed a folder\n");
            if (socket(AF_INET, SOCK_STREAM, 0) >= 0 || socket(AF_UNIX, SOCK_STREAM, 0) >= 0) fail("it has a socket\n");
            if (fork() >= 0) fail("it forked\n");
            if (!kill(getppid(), 0)) fail("it can signal\n");
            done = 1;
        }
        static void called(void) { if (!done) return; }
    "#;
    let (trace, library) = prepare(&directory, code);
    let row = row(&trace, &library);
    assert!(row["failed"].is_null(), "{row}");
    assert!(!directory.path().join("harm").exists() && directory.path().join("library.c").exists());
}
