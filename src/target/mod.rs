//! Which process: identity, mappings, mapped files and build ids, allocator detection.
