//! Shows which container uses the RAM and VRAM of a GPU host, and why one was killed.
//!
//! Data flows in one direction, from top to bottom:
//!
//! ```text
//!             kernel files    Docker, Podman, CRI        NVML
//!                  |                  |                    |
//!                  v                  v                    v
//!  foundations: clock  text  catalog  parse  series  stats  host  config  connect
//!                                |
//!            discover   lists the containers and finds their cgroups
//!                                |
//!            lifecycle  which run of a container it is, and how far
//!                                |
//!            reporter   receives what processes of containers report from inside
//!                                |
//!            container_logs   finds CUDA out-of-memory errors in logs of containers, if that is wanted
//!                                |
//!            gpu        reads the GPU drivers: NVML in a process of its own, amdgpu
//!                                |
//!            collect    reads the kernel, and exports what was read of GPUs, one collector a file
//!                                |
//!            attribute  assigns each process a container and a role: trainer, worker, other
//!                                |
//!            events     what is kept and explained: kills, exits, errors of GPUs
//!                                |
//!            gpu_state  keeps the peaks and the errors of GPUs over cycles
//!                                |
//!            runs       what each run needed: peaks, records, and advice from them
//!                                |
//!            ledger     decides kills and exits, on a thread of its own, and keeps them in a database
//!                                |
//!            diagnose   why a run ended, as data: from events, from the host, from a saved log
//!                                |
//!            snapshot   one finished cycle, immutable, shared
//!                                |
//!            overview   who uses RAM and VRAM now, for `ps`, `top` and the web page; its last hour
//!                                |
//!            sampler    runs the steps above once per interval, on its own thread
//!                                |
//!            export     snapshot -> Prometheus text, OTLP, JSON, Markdown: pure functions
//!                                |
//!            http       HTTP server, access control, API and web page
//!                                |
//!            otlp       exports metrics and events to an OTLP endpoint, if one is set
//!                                |
//!            run_reports   writes the report of each ended run to a directory or to S3, if that is set
//!                                |
//!            cli        one file per verb
//! ```
//!
//! A module uses only modules above it in the list below; `tests/layers.rs` checks this by the `use crate::` lines.

#![deny(unsafe_code)]
#![warn(missing_docs)]

pub mod clock;
pub mod text;
pub mod catalog;
pub mod parse;
pub mod series;
pub mod stats;
pub mod host;
pub mod config;
pub mod connect;
pub mod discover;
pub mod lifecycle;
pub mod reporter;
pub mod container_logs;
pub mod gpu;
pub mod collect;
pub mod attribute;
pub mod events;
pub mod gpu_state;
pub mod runs;
pub mod ledger;
pub mod diagnose;
pub mod snapshot;
pub mod overview;
pub mod sampler;
pub mod export;
pub mod http;
pub mod otlp;
pub mod run_reports;
pub mod cli;
