//! What this kernel lets us do, found by doing it: for `doctor`.

use super::load;
use crate::probe::features::{Attach, Features, Support};

/// Everything that [`Features`] asks for. Takes some 100 ms a method: the programs are loaded and attached to this process for each.
pub fn features() -> Features {
    let mut features = Features::of_host();
    let mut loaded = false;
    for method in Attach::ALL {
        let support = match load::load(Some(method)) {
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
