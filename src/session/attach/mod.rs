//! Starts commands and follows processes so that not even their first allocation is missed.

pub(in crate::session) mod held;
pub(in crate::session) mod launch;
pub(in crate::session) mod tracer;
