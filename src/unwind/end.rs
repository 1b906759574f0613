//! Why a walk ended: `enum fp_unwind_end` of `bpf/fragprof.h`.

use std::fmt;

macro_rules! ends {
    ($($(#[$meta:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// Why a walk ended. Stored in each stack, counted, shown.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum End {
            $($(#[$meta])* $name = $value,)*
        }

        impl End {
            /// All of them, in the order of their numbers.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The end with this number on the wire; `None` if there is none.
            #[must_use]
            pub fn from_wire(value: u8) -> Option<Self> {
                match value {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// What it means, for people.
            #[must_use]
            pub fn description(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

ends! {
    /// Reached the thread's or the process's entry.
    Complete = 1, "complete";
    /// More frames than are kept.
    FrameLimit = 2, "more frames than the limit";
    /// A pc in no known executable mapping.
    NoMapping = 3, "an address in no known mapping";
    /// The mapping's table is not loaded.
    NoTable = 4, "the file's unwind table is not loaded (yet, or refused by the budget)";
    /// The file says nothing of this address.
    NoRow = 5, "no unwind information for an address";
    /// A rule of a form that is not evaluated.
    Unsupported = 6, "an unwind rule of an unsupported form";
    /// Stack memory could not be read.
    ReadFault = 7, "stack memory that could not be read";
    /// The stack pointer did not rise.
    NoProgress = 8, "a corrupt stack: the frames do not rise";
    /// A return address that no code can have.
    BadPc = 9, "a return address outside user space";
    /// Generated code without frame pointers.
    Jit = 10, "generated code without frame pointers";
    /// A return trampoline of a probe whose original was not found.
    Trampoline = 11, "a probe's return trampoline that could not be resolved";
    /// By frame pointers alone.
    FramePointersOnly = 12, "walked by frame pointers alone";
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.description())
    }
}

/// The address within a frame word.
pub const FRAME_ADDRESS_MASK: u64 = (1 << 56) - 1;
/// The frame's address is the instruction itself, not a return address.
pub const FRAME_EXACT: u64 = 1 << 56;
/// Found by a guarded frame-pointer step where no table could tell.
pub const FRAME_GUESSED: u64 = 1 << 57;
/// In generated code.
pub const FRAME_JIT: u64 = 1 << 58;
/// A signal trampoline.
pub const FRAME_SIGNAL: u64 = 1 << 59;
