//! The live view of `fragprof top`.
//!
//! ```text
//! Recorder ─ collect::Collector ─→ sample::Sample ─┬─ draw::draw(sample, state) ─→ terminal
//!            (thread fragprof-top)                  ├─ text::page ─→ plain text
//!                                                   └─ serde_json ─→ --json
//! ```
//!
//! A [`Sample`](sample::Sample) is plain values: every view shows its contents and computes no numbers of its own. Another source, such as an
//! agent, replaces the collector by sending samples through the same channel.
//!
//! | file | job | pure |
//! |---|---|---|
//! | [`sample`] | the sample model and its JSON | yes |
//! | [`choose`] | which stacks a sample carries | yes |
//! | [`heap`] | the heap by a census, or by its mappings | ranges: yes |
//! | [`collect`] | recorder and `/proc` to samples | no |
//! | [`words`] | a process's figures as labelled lines | yes |
//! | [`text`] | plain text for a pipe | yes |
//! | [`state`] | what is shown and selected; what keys do | yes |
//! | `keys` | keys with the same meaning in every list | yes |
//! | [`draw`] | sample and state to a frame; its heap's bar in a file of its own | yes |
//! | [`filter`] | editing a filter | yes |
//! | [`screen`] | the terminal, restored in every case | no |
//! | [`input`] | keys, the mouse, hang-up | no |
//! | [`live`] | the event loop | no |
//! | [`cluster`] | the workloads of a cluster, from a Prometheus | yes |
//! | [`node`] | all processes, from an agent or a collector inside `top` | parts: yes |

mod bar;
pub mod choose;
pub mod cluster;
pub mod collect;
pub mod draw;
pub mod filter;
pub mod heap;
pub mod input;
mod keys;
pub mod live;
pub mod node;
pub mod sample;
pub mod screen;
pub mod state;
#[cfg(test)]
mod testing;
pub mod text;
pub mod words;
