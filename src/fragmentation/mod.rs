//! The ladder, pinning, blocking, growth and verdicts: pure functions over census, ledger and residency.
