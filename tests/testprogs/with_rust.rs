//! Boxes, vectors that grow, zeroed and over-aligned blocks on Rust's system allocator, kept or dropped. The ledger is what was asked
//! of the allocator: a vector's growth is a realloc of its block.

use std::alloc::{Layout, alloc, alloc_zeroed};
use std::hint::black_box;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

#[inline(never)]
#[no_mangle]
fn site_box() -> Box<[u8; 48]> {
    black_box(Box::new([1; 48]))
}

#[inline(never)]
#[no_mangle]
fn site_vector(bytes: usize) -> Vec<u8> {
    black_box(Vec::with_capacity(bytes))
}

#[inline(never)]
#[no_mangle]
fn site_zeroed() -> *mut u8 {
    // SAFETY: the layout is not empty.
    black_box(unsafe { alloc_zeroed(Layout::from_size_align(5000, 8).unwrap()) })
}

#[inline(never)]
#[no_mangle]
fn site_aligned() -> *mut u8 {
    // SAFETY: the layout is not empty.
    black_box(unsafe { alloc(Layout::from_size_align(4096, 4096).unwrap()) })
}

fn rendezvous(stream: &mut UnixStream, phase: &str, sites: &str) {
    writeln!(stream, "{{\"phase\":\"{phase}\",\"pid\":{},\"sites\":[{sites}]}}", std::process::id()).unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

fn main() {
    let mut stream = UnixStream::connect(std::env::var("TRUTH_SOCKET").unwrap()).unwrap();
    rendezvous(&mut stream, "ready", "");
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
    let row = |site: &str, live_bytes: usize, live_count: usize, allocated_bytes: usize, allocations: usize| {
        format!(
            "{{\"site\":\"{site}\",\"live_bytes\":{live_bytes},\"live_count\":{live_count},\"allocated_bytes\":{allocated_bytes},\
             \"allocations\":{allocations},\"live_only\":false}}"
        )
    };
    let vectors = |step: usize| (0..300).step_by(step).map(|i| 100 + i).sum::<usize>();
    let sites = [
        row("site_box", 250 * 48, 250, 1000 * 48, 1000),
        row("site_vector", vectors(3), 100, vectors(1), 300),
        row("site_zeroed", 50_000, 10, 50_000, 10),
        row("site_aligned", 40_960, 10, 40_960, 10),
    ];
    rendezvous(&mut stream, "done", &sites.join(","));
}
