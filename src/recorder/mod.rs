//! A recording from attach to profile: drives target, probe, capture, ledger and census for `record` and `top`.
