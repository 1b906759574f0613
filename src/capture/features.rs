//! Features of this kernel, determined by trying them: for `doctor`.

use std::time::Duration;

use super::tables::FileStatus;
use super::{Capture, Config, Result, load, tables, trial};
use crate::probe::features::{Attach, Features, Support};
use crate::process::Process;

/// Determines all [`Features`]. Takes about 100 ms per method: the programs are loaded and attached to this process for each.
pub fn features() -> Features {
    let mut features = Features::of_host();
    features.task_storage = map_type(libbpf_sys::BPF_MAP_TYPE_TASK_STORAGE);
    features.ring_buffer = map_type(libbpf_sys::BPF_MAP_TYPE_RINGBUF);
    features.attach_cookie = helper(libbpf_sys::BPF_FUNC_get_attach_cookie);
    features.bpf_loop = helper(libbpf_sys::BPF_FUNC_loop);
    for method in Attach::ALL {
        let support = match load::load(&Config { method: Some(method), ..Config::default() }) {
            Ok((object, _)) => {
                if features.unwind_tables == Support::Unknown {
                    features.unwind_tables =
                        tables::try_out(&object).map_or_else(|error| Support::No(error.to_string()), |()| Support::Yes);
                }
                Support::Yes
            }
            Err(error) => Support::No(error.to_string().lines().next().unwrap_or_default().to_owned()),
        };
        match method {
            Attach::Session => features.uprobe_session = support,
            Attach::Multi => features.uprobe_multi = support,
            Attach::PerfEvents => features.perf_uprobe = support,
            Attach::ByAddress => features.perf_uprobe_by_address = support,
        }
    }
    features
}

/// Whether this thread can attach one probe link to many sites. Takes some milliseconds: the program does nothing.
pub fn has_uprobe_multi() -> bool {
    [Attach::Session, Attach::Multi].into_iter().any(|method| trial::glance(method).is_ok())
}

/// Whether the kernel can create maps of this type.
fn map_type(kind: libbpf_sys::bpf_map_type) -> Support {
    // SAFETY: a null for the options is allowed.
    probed(unsafe { libbpf_sys::libbpf_probe_bpf_map_type(kind, std::ptr::null()) })
}

/// Whether uprobe programs may call this helper.
fn helper(number: libbpf_sys::bpf_func_id) -> Support {
    // SAFETY: a null for the options is allowed.
    probed(unsafe { libbpf_sys::libbpf_probe_bpf_helper(libbpf_sys::BPF_PROG_TYPE_KPROBE, number, std::ptr::null()) })
}

/// libbpf's result: 1 = supported, 0 = not supported, negative = could not be determined.
fn probed(answer: i32) -> Support {
    match answer {
        1 => Support::Yes,
        0 => Support::No("this kernel does not have it, or refuses it".into()),
        error => Support::No(std::io::Error::from_raw_os_error(-error).to_string()),
    }
}

/// Maximum wait for the tables of a process that is only examined.
const TABLES_WAIT: Duration = Duration::from_secs(10);

/// The unwind table of each file that a process maps, built as for a recording.
///
/// # Errors
/// If BPF is not permitted, or the process has ended.
pub fn unwind_tables(process: &Process) -> Result<Vec<FileStatus>> {
    let capture = Capture::load(&Config::default())?;
    let Ok(maps) = process.maps() else { return Ok(Vec::new()) };
    let mm_id = process.pid().0;
    capture.tables().sync_process(process, mm_id, &maps)?;
    // Tables that are not converted by then are shown as pending.
    let _ = capture.tables().wait_until_loaded(TABLES_WAIT);
    Ok(capture.tables().files_of(mm_id))
}
