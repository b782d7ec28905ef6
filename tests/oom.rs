//! The OOM ledger against real kills by the real kernel, here and in the cgroup v2 guest.
//!
//! A test of a hard case is named after it: `case_05_...`. Each first makes sure that the kernel made exactly the kills that
//! the scene is about, read from the kernel log by the test itself, and then asks the ledger.

mod alone;
mod away;
mod bursts;
mod durable;
mod exits;
mod host;
mod limits;
mod names;
mod pods;
mod sources;
mod why;
