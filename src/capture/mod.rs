//! The BPF edge: the only module that knows libbpf. Loads and attaches the programs, consumes the rings, decodes records.
