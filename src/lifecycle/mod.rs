//! Which run of a container is this? Pure: no I/O, no clock.
//!
//! A run begins when the container starts and ends when it exits. Its times are reports: they come late, twice, in another order and
//! with another precision from each source. So nothing identifies a run by them: it gets a number when it begins, and each event and
//! record of it has that.

mod id;

pub use id::{RunId, RunNumber};

/// Times of one report that was read, or stored and read again, differ by less than this, in seconds: the precision of a stored time.
const SAME_REPORT: f64 = 1e-5;

/// Returns whether two times are from the same report: a source repeats its reports after a reconnection.
pub fn is_same_report(one: f64, other: f64) -> bool {
    (one - other).abs() < SAME_REPORT
}
