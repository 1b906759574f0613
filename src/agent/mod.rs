//! The daemon: watches every process that the rules select, at a cost that the operator sets, and serves the results.
//!
//! ```text
//! rules ─→ discovery ─→ schedule ←─ budget          (pure, except the scan of /proc)
//!                          │
//!                       collect  (thread fragprof-census: the only one that reads targets)
//!                          │ publishes
//!                       model::snapshot  (immutable)
//!                       ├──→ metrics ─→ server      (thread fragprof-http)
//!                       └──→ server's API and pages
//! daemon: signals, reload, the service manager's watchdog (main thread)
//! ```
//!
//! Files: [`config`] what can be set, [`rules`] which processes, [`discovery`] finding them, [`containers`] whose container a process is in,
//! [`cri`] its names, [`budget`] processor time, [`schedule`] what comes next and what is shed, [`collect`] the loop, [`flight`] what is kept
//! of processes that end or near their limit, [`governed`] whose allocations are attributed, [`listening`] whose own samples are heard,
//! [`leaks`] to whose blocks nothing points, [`need`] who needs it most, [`push`] profiles to a server, [`notify`] the service manager,
//! [`socket`] the unix socket, [`privileges`] what is given up.

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
pub mod schedule;
pub mod socket;
pub mod worker;

pub use config::Config;
