//! `with_rust.rs` on mimalloc.

#[path = "../../../testprogs/with_rust.rs"]
mod with_rust;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() {
    with_rust::run(|| {});
}
