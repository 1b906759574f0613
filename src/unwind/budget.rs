//! Which tables stay in memory: least recently used go first.
