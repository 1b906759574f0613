//! A process: identity, mappings, mapped files and build ids, container.
//!
//! ```text
//! Process ──→ maps ──→ file (attach path, identity) ──→ elf (segments, symbols)
//!         ├──→ stack (frames of waiting threads), statm (its memory, as the kernel sums it)
//!         └──→ container (which container and pod, and its memory limit) ──→ workload (what it belongs to)
//! ```
//!
//! Every path goes through `/proc/PID/map_files` or `/proc/PID/root`, so that containers, deleted files and overlay files work.

pub mod container;
pub mod elf;
pub mod file;
pub mod functions;
pub mod handle;
pub mod maps;
pub mod stack;
pub mod statm;
pub mod workload;

pub use file::{FileIdentity, MappedFile};
pub use handle::{Process, ProcessError, ProcessId};
pub use maps::{Backing, Mapping, Maps};
pub use statm::Statm;

#[cfg(test)]
pub(crate) mod testing {
    //! A process for tests.
    #![allow(clippy::unwrap_used)]

    use std::io::{Read, Write};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};

    /// A `cat`, or a copy of it, that has reached its main function (it has echoed input). Killed on drop.
    pub struct Cat(pub Child);

    impl Cat {
        /// Starts one, with a preloaded library if given.
        pub fn start(program: &Path, preload: Option<&str>) -> Self {
            let mut command = Command::new(program);
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            if let Some(library) = preload {
                command.env("LD_PRELOAD", library);
            }
            let mut child = command.spawn().unwrap();
            child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            Self(child)
        }

        /// Its pid.
        pub fn pid(&self) -> crate::units::Pid {
            crate::units::Pid(self.0.id())
        }

        /// Kills it and waits for its end.
        pub fn end(&mut self) {
            self.0.kill().unwrap();
            self.0.wait().unwrap();
        }
    }

    impl Drop for Cat {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}
