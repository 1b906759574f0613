//! A walk over parts that do not depend on each other, shared among threads: each takes a run of the parts, and the results are joined in
//! their order.

use std::thread;

/// A walk that collects what it finds in the parts.
pub(super) trait Shared<Part>: Send + Sized {
    /// Threads that may read at once.
    fn threads(&self) -> usize;

    /// The same walk for another thread: it has found nothing yet.
    fn of_thread(&self) -> Self;

    /// Walks a part.
    fn add(&mut self, part: &Part);

    /// Adds what another thread found, in later parts.
    fn take_over(&mut self, other: &Self);
}

/// Walks all parts. Threads that the system refuses to start are done without.
pub(super) fn walk<Part: Sync, W: Shared<Part>>(mut all: W, parts: &[Part]) -> W {
    let threads = all.threads().clamp(1, parts.len().max(1));
    let mut groups = parts.chunks(parts.len().div_ceil(threads).max(1));
    let own = groups.next().unwrap_or_default();
    thread::scope(|scope| {
        let others: Vec<_> = groups
            .map(|group| {
                let mut walk = all.of_thread();
                let job = move || {
                    group.iter().for_each(|part| walk.add(part));
                    walk
                };
                (group, thread::Builder::new().name("census".to_owned()).spawn_scoped(scope, job).ok())
            })
            .collect();
        own.iter().for_each(|part| all.add(part));
        for (group, other) in others {
            match other.and_then(|other| other.join().ok()) {
                Some(walk) => all.take_over(&walk),
                None => group.iter().for_each(|part| all.add(part)),
            }
        }
    });
    all
}
