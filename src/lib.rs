//! fragprof shows where a service's memory is: how much of its heap is live, free but held, trimmable and pinned, which call stacks own and
//! pin it, and what to do about it, for unmodified processes, from outside.
//!
//! The modules follow the flow of the data, from the bottom up; each uses only lines below its own (`tests/layers/`):
//!
//! ```text
//! cli
//! daemon
//! server  tui
//! agent  metrics
//! store
//! model
//! session
//! retention  replay
//! capture  fragmentation  selective  trim  attach
//! emitter  managed
//! census  probe  symbol  sampler  inject
//! allocator
//! process
//! ledger  unwind
//! machine  governor  profile  client  trace  ring
//! heap
//! units  bpf  frame  kept  parquet  random  sanitize  replace  seccomp  error
//! ```
//!
//! | module | job | needs root |
//! |---|---|---|
//! | [`process`] | a process, its mappings, its files, its container | reads `/proc` |
//! | [`allocator`] | the allocators, one row each, with their differences and entry points; which of them a process has | reads files |
//! | [`probe`] | where in an allocator's code a probe goes, and what the kernel offers | placement: no |
//! | [`bpf`] | what the BPF programs and the daemon share, generated from the programs' headers | no |
//! | [`emitter`] | files that report sampled allocations by USDT probes of their own | reads files |
//! | [`selective`] | instructions that only large blocks pass, found by running the library in a sandbox | reads files |
//! | [`capture`] | the BPF edge: load, attach, read rings, decode records | yes |
//! | [`unwind`] | `.eh_frame` to compact tables for the BPF unwinder | no |
//! | [`machine`] | properties of the instruction set: registers, user addresses, rules | no |
//! | [`ledger`] | outstanding allocations by address and by stack | no |
//! | [`governor`] | the budget of tracing, when probes are attached, and estimates from windows | no |
//! | [`heap`] | the ladder; address ranges: extents, residency, occupancy of pages | no |
//! | [`census`] | the allocators' own metadata, read from outside | reads memory |
//! | [`retention`] | what points to which blocks: reachability, leaks, owners | reads memory |
//! | [`fragmentation`] | pinning, blocking, growth, verdicts | no |
//! | [`managed`] | frames of managed runtimes: how they are walked, and their names | reads memory |
//! | [`trim`] | free pages given back by a call of the process's own allocator, predicted and checked | traces |
//! | [`attach`] | the sampler's library brought to a running process, and taken away | traces |
//! | [`replay`] | a trace's calls made again under other settings, and measured | no |
//! | [`symbol`] | addresses to function names and lines | reads files |
//! | [`profile`] | the profile model and its encoders | no |
//! | [`session`] | a recording from attach to profile, in one of three tiers | yes |
//! | [`inject`] | one function call made by a running process on a thread of its own | traces |
//! | [`sampler`] | the preload libraries that sample or record in the process | no |
//! | [`ring`] | events of processes that record themselves, from shared memory | no |
//! | [`model`] | the state of a node's processes, as every surface reads it | no |
//! | [`agent`] | the threads of the daemon: discovery, schedule and budget of the census, recordings, pushes | reads memory |
//! | [`daemon`] | the whole agent: start, signals, reload, stop | no |
//! | [`metrics`] | Prometheus exposition of the model | no |
//! | [`store`] | history on disk: samples, profiles, flight records | no |
//! | [`server`] | HTTP: metrics, health, API | no |
//! | [`trace`] | every event of a process in a stream that can be replayed | no |
//! | [`client`] | HTTP and HTTPS requests to an agent, or to a server of profiles | no |
//! | [`frame`], [`kept`], [`units`], [`parquet`], [`random`], [`sanitize`], [`error`] | a frame of a stack, the rule for stacks that keep what they allocate, tables for SQL, numbers with units, random numbers, escaping of texts, exit statuses | no |
//!
//! Pure modules take plain values and return plain values; BPF, `/proc`, clocks and sockets stay at the edge.

pub mod agent;
pub mod allocator;
pub mod attach;
pub mod bpf;
pub mod capture;
pub mod census;
pub mod cli;
pub mod client;
pub mod daemon;
pub mod emitter;
pub mod error;
pub mod fragmentation;
pub mod frame;
pub mod governor;
pub mod heap;
pub mod inject;
pub mod kept;
pub mod ledger;
pub mod machine;
pub mod managed;
pub mod metrics;
pub mod model;
pub mod parquet;
pub mod probe;
pub mod process;
pub mod profile;
pub mod random;
mod replace;
pub mod replay;
pub mod retention;
pub mod ring;
pub mod sampler;
pub mod sanitize;
mod seccomp;
pub mod selective;
pub mod server;
pub mod session;
pub mod store;
pub mod symbol;
pub mod trace;
pub mod trim;
pub mod tui;
pub mod units;
pub mod unwind;
