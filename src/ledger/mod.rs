//! Outstanding allocations of a process, by address and by stack. Pure.
