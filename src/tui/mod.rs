//! The live view of `fragprof top`.
//!
//! ```text
//! Recorder ─ collect::Collector ─→ sample::Sample ─┬─ draw::draw(sample, state) ─→ terminal
//!            (thread fragprof-top)                  ├─ text::page ─→ plain text
//!                                                   └─ serde_json ─→ --json
//! ```
//!
//! A [`Sample`](sample::Sample) is plain values: every view shows what is in it and computes no numbers of its own. Another source, such
//! as an agent, takes the collector's place by sending samples through the same channel.
//!
//! | file | job | pure |
//! |---|---|---|
//! | [`sample`] | the sample model and its JSON | yes |
//! | [`choose`] | which stacks a sample carries | yes |
//! | [`heap`] | the heap by a census, or by its mappings | ranges: yes |
//! | [`collect`] | recorder and `/proc` to samples | no |
//! | [`words`] | a process's figures as labelled lines | yes |
//! | [`text`] | the page for a pipe | yes |
//! | [`state`] | what is shown and selected; what keys do | yes |
//! | `keys` | keys that mean the same in every list | yes |
//! | [`draw`] | sample and state to a frame; its heap's bar in a file of its own | yes |
//! | [`filter`] | typing a filter | yes |
//! | [`screen`] | the terminal, put back in every case | no |
//! | [`input`] | keys, the mouse, the terminal's end | no |
//! | [`live`] | the event loop | no |
//! | [`node`] | all processes, as an agent or a collector of `top`'s own sees them | parts: yes |

mod bar;
pub mod choose;
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
