//! The user registers of a process's threads, read by a BPF iterator over tasks: nothing is stopped or attached to the process.

use std::io::Read as _;

use libbpf_rs::{Iter, Link, Object, ObjectBuilder};
use zerocopy::FromBytes as _;

use super::{Error, Result, load};
use crate::bpf;
use crate::units::Pid;

/// The compiled iterator.
static OBJECT: &[u8] = load::aligned_object!("registers.bpf.o");
/// Maximum number of bytes read: those of the maximum number of threads.
const BYTES_MAX: u64 = (crate::units::THREADS_MAX * size_of::<bpf::ThreadRegisters>()) as u64;

/// The iterator for one process.
#[derive(Debug)]
pub struct ThreadRegisters {
    link: Link,
    _object: Object,
}

impl ThreadRegisters {
    /// Loads the iterator.
    ///
    /// # Errors
    /// If the kernel refuses it: it takes CAP_BPF and CAP_PERFMON, and Linux 5.15 for `bpf_task_pt_regs`.
    pub fn of(pid: Pid) -> Result<Self> {
        let failed = |error: libbpf_rs::Error| Error::Load { reason: format!("{error:#}"), hint: load::hint() };
        let load = || {
            let mut open = ObjectBuilder::default().open_memory(OBJECT)?;
            for mut map in open.maps_mut().filter(|map| map.name().to_string_lossy().ends_with(".rodata")) {
                map.set_initial_value(&pid.0.to_ne_bytes())?;
            }
            let object = open.load()?;
            let link = load::program(&object, "thread_registers")?.attach_iter_with_opts(libbpf_rs::IterOpts::None)?;
            Ok(Self { link, _object: object })
        };
        load().map_err(failed)
    }

    /// All register words of all threads, as the kernel saved them when each thread last entered it; empty if they cannot be read now.
    #[must_use]
    pub fn read(&self) -> Vec<u64> {
        let Ok(iter) = Iter::new(&self.link) else { return Vec::new() };
        let mut bytes = Vec::new();
        // Data read before an error is used: the words are independent of each other.
        let _ = iter.take(BYTES_MAX).read_to_end(&mut bytes);
        let records = bytes.chunks_exact(size_of::<bpf::ThreadRegisters>());
        records.filter_map(|record| bpf::ThreadRegisters::read_from_bytes(record).ok()).flat_map(|record| record.words).collect()
    }
}
