//! Pinning, blocking, growth and verdicts: pure functions over census, ledger and residency.
//!
//! | file | job |
//! |---|---|
//! | [`by_stack`] | bytes by stack, and unattributed bytes |
//! | [`pinned`] | free bytes on pages that also hold live blocks |
//! | [`blocked`] | free pages under the highest live chunk of a heap |
//! | [`growth`] | growth while enough free bytes were available |
//! | [`survey`] | one walk over a heap: sums by range, and pinning |
//! | [`trend`] | how live bytes, and memory outside malloc, change over several samples |
//! | `outside` | resident memory outside malloc: which kinds count, which can grow, remedies |
//! | `decide` | the findings, the verdict first |
//! | `estimated` | findings from a sample of a heap, before a full walk |
//! | `remedy` | remedies, by allocator |
//! | [`verdict`] | the verdict, with evidence and remedies |
//! | [`recorded`] | the verdict on a profile, from its censuses and stacks |

pub mod blocked;
pub mod by_stack;
mod decide;
mod estimated;
pub mod growth;
mod outside;
pub mod pinned;
pub mod recorded;
mod remedy;
pub mod survey;
pub mod trend;
pub mod verdict;
