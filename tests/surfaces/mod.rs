//! The agent's surfaces: API, history, flight records, rules, `top`.

mod api;
mod figures;
mod flight;
mod generated;
mod history;
mod hostile;
mod pprof;
mod progress;
mod rules;
mod tls;
mod top;
