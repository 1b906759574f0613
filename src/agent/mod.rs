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
//! Files: [`config`] what can be set, [`rules`] which processes, [`discovery`] finding them, [`budget`] processor time, [`schedule`] what
//! comes next and what is shed, [`collect`] the loop, [`containers`] whose container a process is in, [`cri`] its names, [`governed`] whose
//! allocations are attributed and [`need`] who needs it most, [`sample`] the model, [`notify`] the service manager, [`privileges`] what is
//! given up, [`run`](mod@run) the life of the daemon.

pub mod budget;
pub mod collect;
pub mod config;
pub mod containers;
pub mod cri;
pub mod discovery;
pub mod governed;
pub mod need;
pub mod notify;
pub mod privileges;
pub mod rules;
pub mod run;
pub mod sample;
pub mod schedule;

pub use config::Config;
pub use run::run;
pub use sample::{ProcessSample, Published, Snapshot};
