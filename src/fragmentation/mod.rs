//! The ladder, pinning, blocking, growth and verdicts: pure functions over census, ledger and residency.
//!
//! | file | job |
//! |---|---|
//! | [`by_stack`] | bytes by stack, unattributed apart |
//! | [`pinned`] | free bytes on pages that live blocks keep |
//! | [`blocked`] | free pages under the highest live chunk of a heap |
//! | [`growth`] | growth while free bytes were lying around |
//! | [`ratio`] | `fragmentation_ratio` and `extent_ratio` |
//! | [`survey`] | one walk over a heap: sums by range, and pinning |

pub mod blocked;
pub mod by_stack;
pub mod growth;
pub mod pinned;
pub mod ratio;
pub mod survey;
