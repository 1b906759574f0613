//! The ladder, pinning, blocking, growth and verdicts: pure functions over census, ledger and residency.
//!
//! | file | job |
//! |---|---|
//! | [`by_stack`] | bytes by stack, unattributed apart |
//! | [`pinned`] | free bytes on pages that live blocks keep |
//! | [`blocked`] | free pages under the highest live chunk of a heap |
//! | [`growth`] | growth while free bytes were lying around |
//! | [`ladder`] | extent, resident, live, and what the free part is worth |
//! | [`ratio`] | `fragmentation_ratio` and `extent_ratio` |
//! | [`survey`] | one walk over a heap: sums by range, and pinning |
//! | [`trend`] | how live bytes, and what is outside malloc, go over several looks |
//! | `outside` | what is resident outside malloc: what counts, what can grow, what helps |
//! | `decide` | which causes hold, the verdict first |
//! | `estimated` | what a sample of a heap settles before a walk |
//! | `remedy` | what would help, by allocator |
//! | [`verdict`] | what is wrong, with evidence and remedies |
//! | [`recorded`] | the verdict on a profile: what its censuses and its stacks say |

pub mod blocked;
pub mod by_stack;
mod decide;
mod estimated;
pub mod growth;
pub mod ladder;
mod outside;
pub mod pinned;
pub mod ratio;
pub mod recorded;
mod remedy;
pub mod survey;
pub mod trend;
pub mod verdict;
