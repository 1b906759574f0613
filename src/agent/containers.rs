//! The containers of the watched processes. Called by the census thread; it reads `/proc` and the cgroup file system, about ten small files
//! per process.

use std::path::PathBuf;
use std::sync::Arc;

use super::config::CriSocket;
use super::cri::{Cri, Directory};
use crate::model::counters::CriStatus;
use crate::process::container::{CgroupFile, CgroupMemory, Hierarchies, Surroundings};
use crate::units::Pid;

/// What is needed to find a process's container and memory limit.
#[derive(Debug)]
pub struct Containers {
    hierarchies: Hierarchies,
    socket: CriSocket,
    cri: Option<Cri>,
    directory: Arc<Directory>,
}

impl Containers {
    /// Finds the cgroup hierarchies, and starts requesting names from the container runtime.
    #[must_use]
    pub fn start(socket: CriSocket) -> Self {
        let hierarchies = Hierarchies::find();
        for doubt in &hierarchies.doubts {
            tracing::warn!("{doubt}");
        }
        let cri = ask(&socket);
        Self { hierarchies, socket, cri, directory: Arc::default() }
    }

    /// Switches to another socket.
    pub fn reload(&mut self, socket: CriSocket) {
        if socket != self.socket {
            self.cri = ask(&socket);
            self.socket = socket;
            self.directory = Arc::default();
        }
    }

    /// Loads the newest names. Call it before a round over the processes.
    pub fn refresh(&mut self) {
        if let Some(cri) = &self.cri {
            self.directory = cri.directory();
        }
    }

    /// The state of the runtime.
    #[must_use]
    pub fn status(&self) -> CriStatus {
        self.cri.as_ref().map(Cri::status).unwrap_or_default()
    }

    /// The container and memory limit of a new process: if its container has no name, the runtime is asked.
    #[must_use]
    pub fn of_new(&self, pid: Pid) -> Surroundings {
        let surroundings = self.of(pid);
        let nameless = surroundings.container.as_ref().is_some_and(|container| container.pod.is_none());
        if let Some(cri) = self.cri.as_ref().filter(|_| nameless) {
            cri.want();
        }
        surroundings
    }

    /// The memory of a process's cgroup, even after the process has ended.
    #[must_use]
    pub fn memory(&self, cgroup: &CgroupFile) -> Option<CgroupMemory> {
        self.hierarchies.memory(cgroup)
    }

    /// The container and memory limit of a process.
    #[must_use]
    pub fn of(&self, pid: Pid) -> Surroundings {
        let mut surroundings = Surroundings::of(pid, &self.hierarchies);
        self.name(&mut surroundings);
        surroundings
    }

    /// Adds a container's names, if they are known meanwhile.
    pub fn name(&self, surroundings: &mut Surroundings) {
        let Some(container) = surroundings.container.as_deref() else { return };
        if let Some(named) = self.directory.named(container).filter(|named| named != container) {
            surroundings.container = Some(Arc::new(named));
        }
    }
}

fn ask(socket: &CriSocket) -> Option<Cri> {
    let path: Option<PathBuf> = match socket {
        CriSocket::Off => return None,
        CriSocket::Auto => None,
        CriSocket::Path(path) => Some(path.clone()),
    };
    match Cri::start(path) {
        Ok(cri) => Some(cri),
        Err(error) => {
            tracing::warn!("no names of containers: cannot start a thread: {error}");
            None
        }
    }
}
