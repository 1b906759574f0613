//! When a stack is flagged as keeping what it allocates: a rule over counts of its sampled survivors (docs/design/0007).

/// Fewest sampled blocks of that age for a result on a stack.
pub const SAMPLED_MIN: u64 = 20;
/// Of them, those that give information.
pub const INFORMATIVE_MIN: u64 = 10;
/// A stack is flagged if at least one in this many of these is found the same.
pub const SAME_ONE_IN: u64 = 5;

/// Whether a stack keeps what it allocates, by its numbers of blocks. `false` means nothing.
#[must_use]
pub fn is_flagged(sampled: u64, informative: u64, same: u64) -> bool {
    sampled >= SAMPLED_MIN && informative >= INFORMATIVE_MIN && same.saturating_mul(SAME_ONE_IN) >= informative
}
