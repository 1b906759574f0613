//! A view of one watched process during the recording.

use crate::process::Process;
use crate::session::report;
use crate::session::sink::{SharedShard, lock};
use crate::session::target::Target;
use crate::session::tier::exact::Watched;
use crate::symbol::AddressSpace;

/// One process of a recording: watched now, or watched until it ended.
pub struct View<'a> {
    target: &'a Target,
    shard: &'a SharedShard,
}

impl<'a> View<'a> {
    pub(in crate::session) fn new(target: &'a Target, shard: &'a SharedShard) -> Self {
        Self { target, shard }
    }

    /// The process, as it was last opened.
    pub fn process(&self) -> &'a Process {
        &self.target.process
    }

    /// Its code as far as it was seen; used to symbolize its stacks.
    pub fn space(&self) -> &'a AddressSpace {
        &self.target.space
    }

    /// Names of the allocators traced in it.
    pub fn allocators(&self) -> &'a [String] {
        &self.target.allocators
    }

    /// The source of its figures, if it is not the allocator's functions.
    pub fn source(&self) -> String {
        self.target.source_with_interval()
    }

    /// Notes on how it is traced.
    pub fn notes(&self) -> &'a [String] {
        &self.target.notes
    }

    /// Whether it has ended: then its ledger no longer changes.
    pub fn has_ended(&self) -> bool {
        self.target.watched.is_some()
    }

    /// Reads its ledger. While the process runs, the thread that writes the ledger waits, so `read` should only copy. `None` if it has no
    /// ledger.
    pub fn watched<R>(&self, read: impl FnOnce(&Watched) -> R) -> Option<R> {
        match &self.target.watched {
            Some(watched) => Some(read(watched)),
            None => lock(self.shard).watched.get(&self.target.slot.index).map(read),
        }
    }

    /// Reasons to doubt its figures, as sentences.
    pub fn doubts(&self, watched: &Watched) -> Vec<String> {
        report::doubts(self.target.loss(), watched)
    }
}
