//! The integration tests: the real binary, real cgroups, a real Docker engine, a real shared library.
//!
//! One file per concern. [`truth`], [`roles`], [`vanishing`] and [`oom`] also run inside the cgroup v2 guest (`tests/v2host`).

mod control_socket;
mod cri;
mod daemon;
mod dashboards;
mod dead_sinks;
mod deploy;
mod docker;
mod engine_sockets;
mod engines;
mod events;
mod facts;
mod filters;
mod gpu;
mod helm;
mod hostile;
mod inside;
mod kernel_log;
mod kernel_log_file;
mod kube;
mod layers;
mod leftovers;
mod names;
mod oom;
mod otlp;
mod performance;
mod podman;
mod privileges;
mod prometheus;
mod recorded;
mod roles;
mod run_command;
mod run_reports;
mod runs;
mod screens;
mod serving;
mod stalls;
mod settings;
mod supply;
mod support;
mod tables;
mod truth;
mod vanishing;
mod web;
mod why;
