//! Advice from records of runs. Pure: each line says which runs it comes from, and what was not measured has no number.

pub mod advice;
pub mod ram_budget;
pub mod vram_fit;
