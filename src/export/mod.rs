//! Renders snapshots, events, verdicts and tables: pure functions, no I/O.

pub mod events;
pub mod json;
pub mod reference_docs;
pub mod otlp_naming;
pub mod prometheus;
pub mod verdict_text;
