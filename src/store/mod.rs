//! History: samples, profiles and flight records, on disk or in memory, bounded by size and age.
//!
//! ```text
//! snapshots, events ─→ keeper (thread fragprof-store) ─→ write, thin ─→ SQLite ─→ read ─→ server, `report --since`, `diff --from`
//! ```
//!
//! Old samples are thinned, not deleted: the older, the longer the step that one row covers. SQLite in WAL mode preserves committed data when
//! the agent is killed or the disk is full; failed writes are counted and retried with the next sample.
//!
//! Files: [`database`] opening and the tables, [`row`] one sample as a row, [`write`](mod@write), [`thin`] and limits, [`read`], [`outcome`]
//! what remedies saved, [`view`] what is shown, [`export`] tables for SQL, [`keeper`] the thread.

mod clock;
pub mod database;
pub mod export;
pub mod keeper;
pub mod outcome;
pub mod read;
pub mod row;
#[cfg(test)]
pub(crate) mod tests;
pub mod thin;
pub mod view;
pub mod write;

pub use database::{Database, StoreError};
pub use keeper::{Keeper, KeeperCounters};
pub use read::Reader;
