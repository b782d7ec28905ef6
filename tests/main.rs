//! The tests against real things: the real binary, real cgroups, a real Docker engine, a real shared library.
//!
//! One file per concern. Those in [`truth`] and [`roles`] also run inside the cgroup v2 guest (`tests/v2host`).

mod layers;
mod serving;
mod support;
mod tables;
