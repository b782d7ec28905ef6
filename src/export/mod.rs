//! Views of a snapshot and of the tables: pure functions, no I/O.

pub mod json;
pub mod markdown;
pub mod prometheus;
