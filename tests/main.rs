//! The tests against real things: the real binary, real cgroups, a real Docker engine, a real shared library.
//!
//! One file per concern. [`truth`], [`roles`] and [`vanishing`] also run inside the cgroup v2 guest (`tests/v2host`).

mod daemon;
mod docker;
mod gpu;
mod layers;
mod podman;
mod prometheus;
mod recorded;
mod roles;
mod serving;
mod support;
mod tables;
mod truth;
mod vanishing;
