//! The kernel log: records of /dev/kmsg, lines of syslog(2), and what the OOM killer and NVIDIA's driver say in them.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| memledger::parse::laws::kernel_log(bytes));
