//! Tests of the OOM ledger with real kills by the real kernel, on this machine and in the cgroup v2 guest.
//!
//! A test of a special case is named after it: `case_05_...`. Each test first reads the kernel log itself, to make sure
//! that the kernel made exactly the kills of its scene, and then compares the ledger.

mod alone;
mod at_limit;
mod away;
mod bursts;
mod durable;
mod exits;
mod followers;
mod host;
mod limits;
mod names;
mod pods;
mod report;
mod sources;
mod unrecorded;
mod why;
