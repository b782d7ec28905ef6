//! The dispositions of signals: those that the NVML process ignores, and those that `memledger run` was started with.

#![allow(unsafe_code)]

/// Ignores the signals that end memledger or make it release the driver: systemd, a terminal and `pidof` send them to both
/// processes. Memledger ends its NVML process itself.
pub fn ignore_signals_of_parent() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1] {
        // SAFETY: SIG_IGN installs no code that could run in a handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Lets this process learn of the end of its children, which one that was started with SIGCHLD ignored does not.
pub fn expect_children() {
    // SAFETY: SIG_DFL installs no code that could run in a handler.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
}

/// Returns the signals that this process ignores, a bit for each: of signal n bit n - 1.
pub fn ignored() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default()
}
