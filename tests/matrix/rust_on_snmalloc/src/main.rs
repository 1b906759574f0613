//! `with_rust.rs` on snmalloc.

#[path = "../../../testprogs/with_rust.rs"]
mod with_rust;

#[global_allocator]
static ALLOCATOR: snmalloc_rs::SnMalloc = snmalloc_rs::SnMalloc;

fn main() {
    with_rust::run(|| {});
}
