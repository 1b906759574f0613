//! Where to probe: placement by disassembly, entry points of each allocator, and what this kernel can attach.
