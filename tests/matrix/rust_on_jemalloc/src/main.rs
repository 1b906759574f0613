//! `with_rust.rs` on jemalloc.

use std::ptr::null_mut;

#[path = "../../../testprogs/with_rust.rs"]
mod with_rust;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() {
    with_rust::run(|| {
        // SAFETY: the name ends in a zero byte, and this call neither reads nor writes a value.
        let refused = unsafe { tikv_jemalloc_sys::mallctl(c"thread.tcache.flush".as_ptr(), null_mut(), null_mut(), null_mut(), 0) };
        assert_eq!(refused, 0);
    });
}
