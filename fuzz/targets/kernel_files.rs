//! Files of /proc and of cgroups, and the paths in them.
#![no_main]

use memledger::parse::invariants;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    invariants::cgroup_files(bytes);
    invariants::process_files(bytes);
    invariants::cgroup_paths(bytes);
});
