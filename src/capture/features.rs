//! What this kernel lets us do, found by doing it: for `doctor`.

use std::time::Duration;

use super::tables::FileStatus;
use super::{Capture, Config, Result, load};
use crate::probe::features::{Attach, Features, Support};
use crate::target::Process;

/// Everything that [`Features`] asks for. Takes some 100 ms a method: the programs are loaded and attached to this process for each.
pub fn features() -> Features {
    let mut features = Features::of_host();
    let mut loaded = false;
    for method in Attach::ALL {
        let support = match load::load(Some(method), false) {
            Ok(_) => {
                loaded = true;
                Support::Yes
            }
            Err(error) => Support::No(error.to_string().lines().next().unwrap_or_default().to_owned()),
        };
        match method {
            Attach::Session => features.uprobe_session = support,
            Attach::Multi => features.uprobe_multi = support,
            Attach::PerfEvents => features.perf_uprobe = support,
        }
    }
    if loaded {
        // What loaded uses all of these.
        for used in [&mut features.attach_cookie, &mut features.task_storage, &mut features.bpf_loop, &mut features.ring_buffer] {
            *used = Support::Yes;
        }
    }
    features
}

/// Longest wait for the tables of a process that is only looked at.
const TABLES_WAIT: Duration = Duration::from_secs(10);

/// The unwind table of each file that a process maps, made as a recording would make it.
///
/// # Errors
/// If BPF is not permitted here, or the process is gone.
pub fn unwind_tables(process: &Process) -> Result<Vec<FileStatus>> {
    let capture = Capture::load(&Config::default())?;
    let Ok(maps) = process.maps() else { return Ok(Vec::new()) };
    let mm_id = process.pid().0;
    capture.tables().sync_process(process, mm_id, &maps)?;
    // What is not converted by then is shown as being converted.
    let _ = capture.tables().wait_until_loaded(TABLES_WAIT);
    Ok(capture.tables().files_of(mm_id))
}
