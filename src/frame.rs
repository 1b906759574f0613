//! One frame of a call stack.

use std::sync::Arc;

/// Module name of generated code; a frame of it is a JIT frame.
pub const MODULE_JIT: &str = "[jit]";

/// One function of a call stack. Texts are as found in the target's files and may contain any character: they are escaped where they are
/// shown ([`crate::sanitize`]).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Frame {
    /// Demangled function name, or a stand-in such as `[libfoo.so+0x123]`. Never empty.
    pub function: Arc<str>,
    /// Source file, empty = not known.
    pub file: Arc<str>,
    /// Source line in `file`, from 1; 0 = not known.
    pub line: u32,
    /// Path of the mapped file, or a name in brackets such as `[vdso]`; empty = not known.
    pub module: Arc<str>,
    /// Build id of the module in lower-case hex, empty = none.
    pub build_id: Arc<str>,
    /// Address of the instruction in the module's own address space, as `nm` and `addr2line -e` take it, so that it is the same in
    /// every run and process; without a module, the address in the process. 0 = not known.
    pub address: u64,
    /// How the frame was found.
    pub flags: FrameFlags,
}

impl Frame {
    /// A frame with a name only.
    pub fn named(function: impl Into<Arc<str>>) -> Self {
        let empty: Arc<str> = Arc::from("");
        Self {
            function: function.into(),
            file: empty.clone(),
            line: 0,
            module: empty.clone(),
            build_id: empty,
            address: 0,
            flags: FrameFlags::default(),
        }
    }
}

/// How a frame was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct FrameFlags {
    /// The compiler inlined this function into the next frame of the stack, its caller, with which it shares address, module and the
    /// other flags.
    pub inlined: bool,
    /// Found by a guarded frame-pointer step: likely, not proven.
    pub guessed: bool,
    /// In generated code.
    pub jit: bool,
}
