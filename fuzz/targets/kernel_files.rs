//! Files of /proc, of cgroups and of graphics devices, and the paths in them.
#![no_main]

use memledger::parse::laws;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    laws::cgroup_files(bytes);
    laws::meminfo(bytes);
    laws::process_files(bytes);
    laws::drm_client(bytes);
    laws::cgroup_paths(bytes);
});
