//! OOM kills and exits of containers: read as they happen, decided once, and kept.
//!
//! The ledger service ([`service`]) runs on a thread of its own: it reads the sources of OOM kills, passes what they know to a pure
//! state machine ([`reconcile`]) and has the result written ([`writer`], [`store`]). The cycle's side ([`cycle`]) gives it what each
//! cycle saw, and writes its figures as series; the two exchange data through [`exchange::SharedState`].
//!
//! | file | content |
//! | --- | --- |
//! | `kmsg_reader.rs`, `victim_probe.rs` | reads a kill's record, and the victim's /proc entry while it still exists |
//! | `container_state.rs`, `run.rs` | one container, and the evidence of each of its runs |
//! | `container_table.rs` | all known containers, from runtime events and from the cycle |
//! | `reconcile/` | pure: how many kills there were, whose they were, whether they ended the container, and why it exited |
//! | `catch_up/` | what happened while no ledger was written: for the start of `serve`, and for `why` and `events` without it |
//! | `totals.rs` | the counters, which never decrease |
//! | `writer.rs`, `store` | commits the results |
//! | `follow.rs` | hands settled events and records of runs to their sinks: the log (`event_log.rs`), OTLP, reports |

pub mod catch_up;
mod container_state;
mod container_table;
pub mod cycle;
mod event_log;
pub mod exchange;
pub mod follow;
pub mod interval;
mod kmsg_reader;
pub mod reconcile;
pub mod run;
pub mod service;
pub mod sources;
pub mod store;
pub mod totals;
pub mod victim_probe;
mod writer;

pub use cycle::{Ledger, LedgerSample, write_figures};
