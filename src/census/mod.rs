//! Allocator metadata read from outside: readers behind one trait, over live processes, core files and fixtures.
