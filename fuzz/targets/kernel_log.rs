//! The kernel log: records of /dev/kmsg, lines of syslog(2), and the messages of the OOM killer and NVIDIA's driver in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| memledger::parse::invariants::kernel_log(bytes));
