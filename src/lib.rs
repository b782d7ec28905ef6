//! memledger: who holds the memory of this GPU host, and who was killed for it.
//!
//! Data flows one way; nothing flows back:
//!
//! ```text
//!             kernel files    Docker, Podman, CRI        NVML
//!                  |                  |                    |
//!                  v                  v                    v
//!  foundations: clock  catalog  series  host  config  parse
//!                                |
//!            discover   which containers are there, and where is their cgroup
//!                                |
//!            collect    what the kernel and the driver say, one file per source
//!                                |
//!            attribute  whose process is it, and what is it: trainer, worker, other
//!                                |
//!            ledger     what must outlive a cycle: peaks, ended containers, OOM kills;
//!                       the kills on a thread and in a file of their own
//!                                |
//!            snapshot   one finished cycle, immutable, shared
//!                                |
//!            cycle      runs the four steps above once per interval, on its own thread
//!                                |
//!            export     snapshot -> Prometheus text, OTLP, JSON, Markdown: pure functions
//!                                |
//!            serve      HTTP
//!                                |
//!            push       OTLP to an endpoint, if one is given
//!                                |
//!            cli        one file per verb
//! ```
//!
//! A module uses only modules above it in this list; `tests/layers.rs` reads the `use crate::` lines and keeps it so.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod clock;
pub mod catalog;
pub mod series;
pub mod host;
pub mod config;
pub mod parse;
pub mod discover;
pub mod collect;
pub mod attribute;
pub mod ledger;
pub mod snapshot;
pub mod cycle;
pub mod export;
pub mod serve;
pub mod push;
pub mod cli;
