//! Advice from records of runs. Pure: each line says which runs it comes from, and what was not measured has no number.

pub mod before_run;
pub mod lines;
mod measurement;
pub mod ram_budget;
mod ram_capacity;
mod ram_lines;
pub mod vram_fit;
mod vram_lines;

pub use measurement::{has_failed, was_killed, worker_share};
