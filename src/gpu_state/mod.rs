//! State of GPUs that outlives a cycle: their number, their peaks of memory, and the errors that their drivers report.

pub mod gpu_count;
pub mod peaks;
pub mod xid_dedup;
pub mod xids;
