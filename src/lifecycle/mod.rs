//! Which run of a container is this, and how far is it? Pure: no I/O, no clock.
//!
//! A run begins when the container starts and ends when it exits. Its times are reports: they come late, twice, in another order and
//! with another precision from each source. So nothing identifies a run by them: it gets a number when it begins, and each event and
//! record of it has that.
//!
//! | file | contents |
//! |---|---|
//! | `id.rs` | the name of a run |
//! | `start.rs` | which run a reported start is of |
//! | `phase.rs` | how far a run is, and how its end became known |
//! | `runs.rs` | the runs of one container: what each report and each cycle changes |
//! | `timing.rs` | all windows of time by which evidence is related |

mod id;
mod phase;
mod runs;
mod start;
pub mod timing;

pub use id::{RunId, RunNumber, RunNumbers};
pub use phase::{ReportedEnd, RunPhase};
pub use runs::{ContainerRuns, ListedContainer, ListingOutcome, Run};
pub use start::{ReportedRun, RunStart, StartReport};
