//! Which run of a container is this? Pure: no I/O, no clock.
//!
//! A run begins when the container starts and ends when it exits. Its times are reports: they come late, twice, in another order and
//! with another precision from each source. So nothing identifies a run by them: it gets a number when it begins, and each event and
//! record of it has that.

mod id;

pub use id::{RunId, RunNumber};
