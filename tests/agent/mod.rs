//! The agent as an operator and a scraper see it: a running daemon, real processes, HTTP.

mod attach;
mod cost;
pub mod daemon;
mod governed;
mod http;
mod life_cycle;
pub mod metrics;
mod reclaim;
mod reclaim_node;
