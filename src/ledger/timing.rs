//! The windows of time by which evidence of kills and ends is related: one table, each with its reason. Pure.
//!
//! A timeout says how long a decision waits for evidence, by the monotonic clock; a window says how far apart the times of two reports may
//! be, in seconds of Unix time. Explanations of the past (`explain`) use the same
//! ones, because they replay the same decisions.
//!
//! Not here: how often something is read, written or retried, which decides nothing.

/// Largest difference between two reports of the same start, in seconds.
pub const START_TOLERANCE: f64 = 1.0;
/// The runtime's event of a start comes at most this many seconds after the time that it reports of it, and after its first process
/// began, which can be killed meanwhile.
pub const MAX_START_EVENT_DELAY: f64 = 5.0;
/// An engine that works reports an end at most this many seconds after the last process is gone.
pub const MAX_END_EVENT_DELAY: f64 = 10.0;
/// The runtime reports the end of a stop within this many seconds after the exit.
pub const STOP_REPORT_DELAY: f64 = 2.0;
/// A killed process may be listed for this many seconds, until its memory is released.
pub const LISTED_AFTER_KILL: f64 = 2.0;
/// For how many seconds processes and memory are kept: a kill may get its owner that long after it.
pub const USAGE_KEPT: f64 = 2.0;
/// How many seconds before an exit a stop request still explains it.
pub const STOP_REQUEST_WINDOW: f64 = 600.0;
