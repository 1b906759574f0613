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
//! Files: [`config`] settings, [`rules`] which processes are watched, [`discovery`] finding them, [`containers`] their containers, [`cri`] names
//! of containers, [`budget`] CPU time, [`schedule`] what comes next and what is shed, [`collect`] the loop, [`flight`] flight records,
//! [`governed`] attribution in windows, [`listening`] samples from emitters, [`leaks`] blocks to which nothing points, [`attach`] the sampler brought to processes, [`reclaim`] giving memory back, [`outcomes`] whether advised
//! settings saved what was predicted, [`need`] which processes
//! need attribution most, [`push`] profiles to a server, [`notify`] the service manager, [`socket`] the unix socket, [`privileges`] dropping
//! privileges.

pub mod attach;
pub mod budget;
pub mod collect;
pub mod config;
pub mod containers;
pub mod cri;
pub mod delivery;
pub mod discovery;
pub mod flight;
pub mod governed;
pub mod leaks;
pub mod listening;
pub mod need;
pub mod notify;
pub mod outcomes;
mod own;
pub mod privileges;
pub mod push;
pub mod reclaim;
pub mod rules;
pub mod schedule;
pub mod socket;
pub mod worker;

pub use config::Config;
