//! Views of a snapshot, of a verdict and of the tables: pure functions, no I/O.

pub mod events;
pub mod json;
#[cfg(any(test, fuzzing))]
pub mod laws;
pub mod markdown;
pub mod otlp;
pub mod prometheus;
pub mod why;
