//! Boxes, vectors that grow, zeroed and over-aligned blocks on Rust's system allocator, kept or dropped. The ledger counts requests to the
//! allocator: a vector's growth is a realloc of its block. With the argument `rounds` it fills and empties a table, in rounds started by
//! the test.

use std::alloc::{Layout, alloc, alloc_zeroed};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

#[inline(never)]
#[unsafe(no_mangle)]
fn site_box() -> Box<[u8; 48]> {
    black_box(Box::new([1; 48]))
}

#[inline(never)]
#[unsafe(no_mangle)]
fn site_vector(bytes: usize) -> Vec<u8> {
    black_box(Vec::with_capacity(bytes))
}

#[inline(never)]
#[unsafe(no_mangle)]
fn site_zeroed() -> *mut u8 {
    // SAFETY: the layout is not empty.
    black_box(unsafe { alloc_zeroed(Layout::from_size_align(5000, 8).unwrap()) })
}

#[inline(never)]
#[unsafe(no_mangle)]
fn site_aligned() -> *mut u8 {
    // SAFETY: the layout is not empty.
    black_box(unsafe { alloc(Layout::from_size_align(4096, 4096).unwrap()) })
}

fn rendezvous(stream: &mut UnixStream, phase: &str, sites: &str) {
    writeln!(stream, "{{\"phase\":\"{phase}\",\"pid\":{},\"sites\":[{sites}]}}", std::process::id()).unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

#[inline(never)]
#[unsafe(no_mangle)]
fn site_kept(bytes: usize) -> Vec<u8> {
    black_box(vec![0; bytes])
}

fn row(site: &str, live_bytes: usize, live_count: usize, allocated_bytes: usize, allocations: usize) -> String {
    format!(
        "{{\"site\":\"{site}\",\"live_bytes\":{live_bytes},\"live_count\":{live_count},\"allocated_bytes\":{allocated_bytes},\
         \"allocations\":{allocations},\"live_only\":false}}"
    )
}

fn once(stream: &mut UnixStream) {
    for i in 0..1000 {
        let one = site_box();
        if i % 4 == 0 {
            std::mem::forget(one);
        }
    }
    for i in 0..300 {
        let one = site_vector(100 + i);
        if i % 3 == 0 {
            std::mem::forget(one);
        }
    }
    for _ in 0..10 {
        black_box(site_zeroed());
        black_box(site_aligned());
    }
    let vectors = |step: usize| (0..300).step_by(step).map(|i| 100 + i).sum::<usize>();
    let sites = [
        row("site_box", 250 * 48, 250, 1000 * 48, 1000),
        row("site_vector", vectors(3), 100, vectors(1), 300),
        row("site_zeroed", 50_000, 10, 50_000, 10),
        row("site_aligned", 40_960, 10, 40_960, 10),
    ];
    rendezvous(stream, "done", &sites.join(","));
}

/// As in rounds.c.
fn rounds(stream: &mut UnixStream, mut table: Vec<Vec<u8>>, flush: fn()) -> ! {
    let (mut random, mut made_bytes, mut made) = (88_172_645_463_325_252_u64, 0, 0);
    let paced = std::env::var_os("TRUTH_PACE").is_some();
    loop {
        for i in 0..20_000 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let most = if random & (1 << 20) == 0 { 300 } else { 5000 };
            let (slot, bytes) = (random as usize % table.len(), 1 + (random >> 24) as usize % most);
            table[slot] = Vec::new();
            table[slot] = site_kept(bytes);
            (made_bytes, made) = (made_bytes + bytes, made + 1);
            if paced && i % 10 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        if std::env::var_os("TRUTH_FLUSH").is_some() {
            flush();
        }
        let live = table.iter().filter(|one| one.capacity() > 0);
        let (live_bytes, live_count) = live.fold((0, 0), |(bytes, count), one| (bytes + one.capacity(), count + 1));
        rendezvous(stream, "round", &row("site_kept", live_bytes, live_count, made_bytes, made));
    }
}

/// The program. `flush` flushes the allocator's cache of the thread.
pub fn run(flush: fn()) {
    let mut stream = UnixStream::connect(std::env::var("TRUTH_SOCKET").unwrap()).unwrap();
    let table = vec![Vec::new(); 4096];
    rendezvous(&mut stream, "ready", "");
    if std::env::args().nth(1).as_deref() == Some("rounds") { rounds(&mut stream, table, flush) } else { once(&mut stream) }
}

#[allow(dead_code)]
fn main() {
    run(|| {});
}
