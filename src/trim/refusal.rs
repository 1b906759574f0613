//! Why memory is not given back.

use std::time::Duration;

use serde::Serialize;
use thiserror::Error;

use crate::census::MemoryError;
use crate::inject::Refusal;
use crate::units::{HumanBytes, ShortDuration};

/// Why no memory is given back. The target is then as it was.
#[derive(Debug, Error)]
pub enum TrimRefusal {
    /// No call can be made in it.
    #[error(transparent)]
    Call(#[from] Refusal),
    /// Its memory cannot be read.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// No heap.
    #[error("no malloc heap was found in it, or none that can be read")]
    NoHeap,
    /// The census is not exact.
    #[error("its heap changed too much while it was read: what a call gives back is not known")]
    NotPredicted,
    /// The allocator has no call for it.
    #[error("its allocator is {allocator}: {reason}")]
    NoCall {
        /// The allocator.
        allocator: &'static str,
        /// Why there is no call.
        reason: &'static str,
    },
    /// Something unknown serves malloc in front of the C library's.
    #[error("{library} serves malloc in front of {allocator}: what it keeps locked is not known")]
    AllocatorInFront {
        /// The file.
        library: String,
        /// The allocator behind it.
        allocator: &'static str,
    },
    /// Several copies of an allocator.
    #[error("it has {copies} copies of {allocator}, and which of them holds the heap is not known")]
    SeveralCopies {
        /// The allocator.
        allocator: &'static str,
        /// Their number.
        copies: usize,
    },
    /// There is nothing to give back.
    #[error("there is nothing to give back: {} of whole free pages", HumanBytes(*bytes))]
    Nothing {
        /// What there is.
        bytes: u64,
    },
    /// The stall would be too long.
    #[error(
        "threads that allocate would wait for up to {}, more than {} (--max-stall); a call cannot be split",
        ShortDuration(predicted.as_secs_f64()),
        ShortDuration(max.as_secs_f64())
    )]
    StallTooLong {
        /// Predicted.
        predicted: Duration,
        /// Allowed.
        max: Duration,
    },
}

impl TrimRefusal {
    /// Its name in JSON, metrics and events.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Call(refusal) => refusal.name(),
            Self::Memory(_) => "memory",
            Self::NoHeap => "no_heap",
            Self::NotPredicted => "not_predicted",
            Self::NoCall { .. } => "no_call",
            Self::AllocatorInFront { .. } => "allocator_in_front",
            Self::SeveralCopies { .. } => "several_copies",
            Self::Nothing { .. } => "nothing",
            Self::StallTooLong { .. } => "stall_too_long",
        }
    }
}

/// A refusal, as it is shown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, schemars::JsonSchema)]
pub struct Refused {
    /// Its name: one word, stable.
    pub name: String,
    /// In words.
    pub reason: String,
}

impl From<&TrimRefusal> for Refused {
    fn from(refusal: &TrimRefusal) -> Self {
        Self { name: refusal.name().to_owned(), reason: refusal.to_string() }
    }
}
