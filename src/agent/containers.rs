//! The containers of the watched processes. Called by the census thread; it reads `/proc` and the cgroup file system, some ten small
//! files a process.

use crate::target::container::Hierarchies;
use crate::target::container::Surroundings;
use crate::units::Pid;

/// What is needed to tell the surroundings of a process.
#[derive(Debug)]
pub struct Containers {
    hierarchies: Hierarchies,
}

impl Containers {
    /// Finds the cgroup hierarchies.
    #[must_use]
    pub fn find() -> Self {
        let hierarchies = Hierarchies::find();
        for doubt in &hierarchies.doubts {
            tracing::warn!("{doubt}");
        }
        Self { hierarchies }
    }

    /// The surroundings of a process.
    #[must_use]
    pub fn of(&self, pid: Pid) -> Surroundings {
        Surroundings::of(pid, &self.hierarchies)
    }
}
