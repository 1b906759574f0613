//! Probes that do nothing: the minimum cost of any tool that uses uprobes. For benchmarks.

use libbpf_rs::{Link, Object, ObjectBuilder, UprobeMultiOpts};

use super::{AttachFile, AttachSite, Error, Result, load};
use crate::units::Pid;

/// The compiled empty programs.
pub(super) static OBJECT: &[u8] = load::aligned_object!("floor.bpf.o");

/// The empty programs, loaded.
#[derive(Debug)]
pub struct Floor {
    object: Object,
}

/// Attached empty probes; dropping it detaches them.
#[must_use]
#[derive(Debug)]
pub struct FloorAttached {
    _links: Vec<Link>,
}

impl Floor {
    /// Loads the programs.
    ///
    /// # Errors
    /// As for [`super::Capture::load`]; not available on kernels without uprobe_multi sessions.
    pub fn load() -> Result<Self> {
        let failed = |error: libbpf_rs::Error| Error::Load { reason: format!("{error:#}"), hint: load::hint() };
        let object = ObjectBuilder::default().open_memory(OBJECT).and_then(|open| open.load()).map_err(failed)?;
        Ok(Self { object })
    }

    /// Attaches an empty entry and return probe to each site with a return, and an empty entry probe to the others.
    ///
    /// # Errors
    /// [`Error::Attach`].
    pub fn attach(&self, pid: Pid, file: &AttachFile) -> Result<FloorAttached> {
        let (sessions, entries): (Vec<&AttachSite>, Vec<&AttachSite>) = file.sites.iter().partition(|site| site.with_return);
        let attach = |name, sites: &[&AttachSite], session| {
            let offsets = sites.iter().map(|site| site.offset.0 as usize).collect();
            let options = UprobeMultiOpts { offsets, session, ..Default::default() };
            load::program(&self.object, name)?.attach_uprobe_multi_with_opts(pid.0 as i32, &file.path, "", options)
        };
        let mut links = Vec::new();
        for (name, sites, session) in [("floor_session", &sessions, true), ("floor_entry", &entries, false)] {
            if !sites.is_empty() {
                let link = attach(name, sites, session).map_err(|source| Error::Attach {
                    pid,
                    path: file.path.display().to_string(),
                    sites: sites.len(),
                    source,
                })?;
                links.push(link);
            }
        }
        Ok(FloorAttached { _links: links })
    }
}
