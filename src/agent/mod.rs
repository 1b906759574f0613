//! The daemon: watches every process the rules name, at a cost the operator sets, and serves what it finds.
//!
//! ```text
//! rules ─→ discovery ─→ schedule ←─ budget          (pure, but for the look through /proc)
//!                          │
//!                       collect  (thread fragprof-census: the only one that reads targets)
//!                          │ publishes
//!                       sample   (one immutable snapshot)
//!                       ├──→ metrics ─→ server      (thread fragprof-http)
//!                       └──→ server's API and pages
//! run: signals, reload, the service manager's watchdog (main thread)
//! ```
//!
//! Files: [`config`] what can be set, [`rules`] which processes, [`discovery`] finding them, [`containers`] whose container a process is in, [`cri`] its names,
//! [`budget`] processor time, [`schedule`] what comes next and what is shed, [`collect`] the loop, [`flight`] what is kept of processes that end or near their limit, [`governed`] whose allocations are attributed, [`listening`] whose own samples are heard and
//! [`leaks`] to whose blocks nothing points, //! [`need`] who needs it most, [`attribution`] what the tiers that know stacks hand over, [`sample`] the model,
//! [`view`] the model as it is shown, [`push`] profiles to a server, [`notify`] the service manager, [`socket`] the unix socket, [`privileges`] what is given up, [`run`](mod@run) the life of the daemon.

pub mod attribution;
pub mod budget;
pub mod collect;
pub mod config;
pub mod containers;
pub mod cri;
pub mod discovery;
pub mod flight;
pub mod governed;
pub mod leaks;
pub mod listening;
pub mod need;
pub mod notify;
mod own;
pub mod privileges;
pub mod push;
pub mod rules;
pub mod run;
pub mod sample;
pub mod schedule;
pub mod snapshot;
pub mod socket;
pub mod view;
pub mod worker;

pub use config::Config;
pub use run::run;
pub use sample::ProcessSample;
pub use snapshot::{Published, Snapshot};
